"""What sees all calls of torch's functions, or all operations, while it is active.

They stand here and not in `_torch`: `user_lines` leaves out the frames of this folder.
"""

from collections.abc import Callable
from typing import Any

import torch

from pfeife import _torch

Instead = Callable[[Any, tuple, dict[str, Any]], Any]


class Calls(torch.overrides.TorchFunctionMode):
    """Has `instead(function, args, kwargs)` done for each call of torch's functions in Python, with
    this mode left out."""

    def __init__(self, instead: Instead):
        super().__init__()
        self.instead = instead

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return self.instead(func, args, kwargs or {})


class Operations(_torch.TorchDispatchMode):
    """Has its method `instead` done for each operation, below autograd, with this mode left out."""

    supports_higher_order_operators = True

    def instead(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the operation gives."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return self.instead(func, args, kwargs or {})
