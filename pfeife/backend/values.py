"""Values of models that were made without: they are there when a step runs."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pfeife import report
from pfeife.frontend.arguments import aliases
from pfeife.frontend.places import Places
from pfeife.frontend.waiting import bare, deferred_tensors, is_waiting, make
from pfeife.runtime.distributed.world import World

log = logging.getLogger("pfeife")


@contextlib.contextmanager
def with_values(
    step: Callable[..., Any], arguments: Mapping[str, Any], world: World | None
) -> Iterator[bool]:
    """While a call builds and runs a step over models from `deferred_init`. In one process they
    have their values then. On ranks (that is what it gives) each makes what its stages use when
    the step is built, and afterwards what no step uses: until then nothing may be read."""
    found = deferred_tensors(step, arguments)
    if not found:
        yield False
        return
    roots = Places(step, arguments).roots.values() if world else ()
    state = {number for root in roots for number in aliases(root)}
    _make([one for one in found if id(one) not in state], found)
    with bare([one for one in found if is_waiting(one)]):
        yield bool(world)
    _make([one for one in found if is_waiting(one)])


def _make(tensors: Sequence[Any], known: Sequence[Any] = ()) -> None:
    if tensors:
        size = report.size(sum(one.nbytes for one in tensors))
        log.info("making the values of %d deferred tensors: %s", len(tensors), size)
        make(tensors, known)
