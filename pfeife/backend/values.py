"""Values of models that were made without: they are there when a step runs."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pfeife import report
from pfeife.frontend.deferred import deferred_tensors, make

log = logging.getLogger("pfeife")


def make_values(step: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Makes the values of all tensors from `deferred_init` that a step reaches."""
    found = deferred_tensors(step, arguments)
    if found:
        size = sum(one.nbytes for one in found)
        log.info("made the values of %d deferred tensors: %s", len(found), report.size(size))
        make(found)
