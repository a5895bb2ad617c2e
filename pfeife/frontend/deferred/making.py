"""Models made without memory: their constructor is recorded, and replayed for what is asked for.

Until then their tensors are `waiting` ones. `deferred_init` and `materialize` are the two ends.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pfeife import _torch
from pfeife.frontend.arguments import aliases
from pfeife.frontend.deferred.checkpoint import shelve
from pfeife.frontend.deferred.recording import Recording, reading
from pfeife.frontend.deferred.tensors import deferred_tensors, is_recorded, is_waiting, make
from pfeife.frontend.watch.gc_objects import living


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """While models are made whose parameters and buffers take no memory.

    Their constructors run, and what they do with tensors is recorded. `materialize` makes the
    values later, bit for bit those of a constructor on one device; torch's default generator goes
    on behind this block as it would behind that constructor. (To know where, the draws are made
    once and given back: that takes time, and the memory of one tensor.) What a constructor reads
    of values is computed for it. Raises ValueError, with the line, for what cannot be recorded:
    draws of other generators than the default one of the CPU, sparse tensors, tensors in numpy's
    memory that are written to.

    >>> torch.manual_seed(0) and None
    >>> with pfeife.deferred_init():
    ...     net = torch.nn.Linear(1000, 1000)
    >>> net.weight.shape, net.weight.device
    (torch.Size([1000, 1000]), device(type='cpu'))
    >>> pfeife.materialize(net)
    >>> same = torch.manual_seed(0) and torch.nn.Linear(1000, 1000)
    >>> torch.equal(net.weight, same.weight)
    True
    """
    # A new tensor is absent only while a constructor is recorded.
    if is_recorded(torch.empty(1)):
        raise ValueError("pfeife.deferred_init() inside of another one: leave out the inner one")
    recording = Recording()
    try:
        # Absent tensors as any others: operations go through autograd down to the recording.
        with _torch.natively(), reading(recording), recording:
            yield
        state, tape = recording.state(), recording.tape
        torch.set_rng_state(state if isinstance(state, torch.Tensor) else tape.state_after(state))
    except BaseException:
        torch.set_rng_state(recording.tape.states[0])
        raise
    finally:
        # After an error, too: whatever reads such a tensor from then on is told what to do.
        recording.end()
        _check_gradients(recording)


def materialize(
    model: nn.Module,
    keep: Callable[[str], bool] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    later: bool = False,
) -> None:
    """Makes the values of a model from `deferred_init`, of parameters and buffers whose names are
    to be kept (all unless given), in the same objects. The others stay without memory, and can be
    made later.

    Tensors that share memory are made together, tied ones if one of their names is kept; tensors
    that are neither parameters nor buffers are always made. More memory than what is kept takes
    only what a single operation of the constructor reads. Models that have their values are left
    alone.

    From a `checkpoint`, the values of what is kept are read instead, and cast as `load_state_dict`
    does; buffers that it has not are made. It is a file of safetensors or of
    `torch.save(model.state_dict())`, a folder of such files with their index, as Hugging Face ships
    models, or a folder of torch.distributed.checkpoint. If it is read `later`, that is when the
    values are needed: at the first call of a step each rank reads those that its stages use.

    Raises ValueError for a tensor that was computed from parameters with gradients, and for a
    checkpoint of other names or shapes.
    """
    tensors, names = deferred_tensors(model), aliases(model)

    def is_kept(tensor: Any) -> bool:
        return keep is None or id(tensor) not in names or any(map(keep, names[id(tensor)]))

    wanted = [tensor for tensor in tensors if is_kept(tensor)]
    if later and checkpoint is None:
        raise ValueError("later=True says when a checkpoint is read, and none was given")
    if checkpoint is not None:
        shelve(wanted, names, Path(checkpoint))
    if not later:
        make(wanted)


def _check_gradients(recording: Recording) -> None:
    """Raises ValueError if a backward has left gradients in what a recording has made."""
    trained = []
    with _torch.plainly():
        for tensor in living(torch.Tensor):
            made_here = is_waiting(tensor) and _torch.record_of(tensor).source is recording.tape
            if made_here and tensor.is_leaf and tensor.grad is not None:
                trained.append(list(tensor.shape))
                tensor.grad = None
    if trained:
        raise ValueError(
            f"a backward has run inside of pfeife.deferred_init(): a parameter {trained[0]} has a "
            "gradient; do that behind it"
        )
