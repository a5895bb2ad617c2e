"""Values of models that were made without: they are there when a step runs."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pfeife import report
from pfeife.frontend.arguments import aliases
from pfeife.frontend.deferred.tensors import deferred_tensors, is_waiting, make, prepare
from pfeife.frontend.watch.reachable_state import Places

log = logging.getLogger("pfeife")


@contextlib.contextmanager
def with_values(
    step: Callable[..., Any], arguments: Mapping[str, Any], at_once: bool
) -> Iterator[bool]:
    """While a call builds and runs a step over models from `deferred_init`. They have their values
    then if these are made `at_once`. Else (that is what it gives) nothing may be read until the
    step is built: then each rank makes what its stages use, and afterwards what no step uses."""
    deferred = deferred_tensors(step, arguments)
    if not deferred:
        yield False
        return
    roots = () if at_once else Places(step, arguments).roots.values()
    state = {number for root in roots for number in aliases(root)}
    # What the step reaches beside its modules, as a list of tensors, belongs to no stage.
    _make([tensor for tensor in deferred if id(tensor) not in state])
    prepare(tensor for tensor in deferred if is_waiting(tensor))
    yield not at_once
    _make([tensor for tensor in deferred if is_waiting(tensor)])


def _make(tensors: Sequence[torch.Tensor]) -> None:
    if tensors:
        size = report.size(sum(tensor.nbytes for tensor in tensors))
        log.info("making the values of %d deferred tensors: %s", len(tensors), size)
        make(tensors)
