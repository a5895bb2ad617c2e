"""What was captured is found again only by those that would capture the same: every part of a step
that can be edited is."""

import contextlib
import importlib.util
import sys
from unittest import mock

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from share import WHOLE, random_cases
from torch import nn

import pfeife
from pfeife.frontend.cache.capture_cache import FOLDER
from pfeife.frontend.cache.capture_key import sources
from pfeife.ir.digest import fingerprint

SCALE = 1.0  # a global that the step reads


@attrs.frozen
class Edit:
    """A step, as somebody may have edited it since it was captured."""

    slope: float = 0.1  # an attribute
    closed: int = 2  # in a closure
    scale: float = 1.0  # a global
    helper: str = "x * 2"  # code of a function in another file
    line: int = 1  # where that stands
    operation: str = "relu"
    frozen: bool = False
    training: bool = True
    rows: int = 4
    width: int = 3
    dtype: torch.dtype = torch.float32
    transposed: bool = False  # strides of the batch
    asks: bool = False  # for gradients of the batch
    hooked: bool = False
    gradients: bool = True
    autocast: bool = False
    buffer: bool = False
    name: str = "x"
    open: bool = False  # whether the rows are left open


class Net(nn.Module):
    def __init__(self, edit):
        super().__init__()
        self.edit_slope = edit.slope
        self.layer = nn.Linear(edit.width, 3, dtype=edit.dtype)
        self.drop = nn.Dropout(0.5)
        if edit.buffer:
            self.register_buffer("count", torch.ones(()))
        else:
            self.count = torch.ones(())

    def forward(self, x):
        return self.drop(self.layer(x)) * self.edit_slope + self.count


def step_of(edit, folder):
    """The step and its batch."""
    file = folder / "helper.py"
    file.write_text("\n" * edit.line + f"def helped(x):\n    return {edit.helper}\n")
    spec = importlib.util.spec_from_file_location("helper", file)
    helper = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "dont_write_bytecode", True):  # which is told by its second
        spec.loader.exec_module(helper)
    torch.manual_seed(0)
    net, closed = Net(edit).train(edit.training), edit.closed
    net.layer.bias.requires_grad_(not edit.frozen)
    if edit.hooked:
        net.layer.register_forward_hook(lambda _, args, out: out * 3)
    operation = getattr(torch, edit.operation)

    def step(x):
        return operation(helper.helped(net(x)) * closed).sum() * SCALE

    def renamed(y):
        return step(y)

    x = torch.ones(edit.rows, edit.width, dtype=edit.dtype)
    x = x.T.contiguous().T if edit.transposed else x
    if edit.open:
        torch._dynamo.mark_dynamic(x, 0)
    return (step if edit.name == "x" else renamed), x.requires_grad_(edit.asks)


def captured(edit, folder, cache):
    global SCALE
    step, x = step_of(edit, folder)
    SCALE = edit.scale
    torch._dynamo.reset()
    cast = torch.autocast("cpu", torch.bfloat16, enabled=edit.autocast)
    try:
        with torch.set_grad_enabled(edit.gradients), cast:
            return pfeife.capture(step, x, cache=cache, loss_reduction="sum")
    finally:
        SCALE = 1.0


EDITS = {
    "slope": [0.2, -0.0, 1.0000000000000002e-1],
    "closed": [3, -2],
    "scale": [1.5],
    "helper": ["x + 2", "x * 2.0", "x.flip(0) * 2"],
    "line": [2],
    "operation": ["tanh", "sigmoid"],
    "frozen": [True],
    "training": [False],
    "rows": [5],
    "width": [4],
    "dtype": [torch.float64, torch.bfloat16],
    "transposed": [True],
    "asks": [True],
    "hooked": [True],
    "gradients": [False],
    "autocast": [True],
    "buffer": [True],
    "name": ["y"],
    "open": [True],
}
ONE_EACH = [Edit(), *(Edit(**{name: one}) for name, some in EDITS.items() for one in some)]
ONE_EACH.append(Edit(rows=5, open=True))  # a program says at which sizes it was captured


def keys(cache):
    return {path.stem for path in (cache / FOLDER).glob("*.json")}


def test_each_edit_has_a_key_of_its_own(tmp_path):
    """And whoever comes second gets the program that he would have captured himself."""
    cache, known, programs = tmp_path / "cache", set(), []
    for edit in ONE_EACH:
        before = len(known)
        programs.append(captured(edit, tmp_path, cache))
        known = keys(cache)
        assert len(known) > before, edit
    for at, (edit, first) in enumerate(zip(ONE_EACH, programs, strict=True)):
        found = [captured(edit, tmp_path, cache)]
        assert keys(cache) == known, edit
        if WHOLE or at % 4 == 0:  # captured once more
            found.append(captured(edit, tmp_path, None))
        for other in found:
            assert fingerprint(other) == fingerprint(first) and str(other) == str(first), edit


edits = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(some) for name, some in EDITS.items()}
).map(lambda given: Edit(**given))


@random_cases(5)
@given(st.lists(edits, min_size=1, max_size=2))
def test_edits_of_several_things(tmp_path, several):
    cache = tmp_path / "cache"
    for edit in (Edit(), *several, *several):
        assert fingerprint(captured(edit, tmp_path, cache)) == fingerprint(
            captured(edit, tmp_path, None)
        )


def test_what_python_computes_of_the_rows(tmp_path):
    """With four rows both steps divide by four. That one is a mean and the other is a sum shows at
    eight."""
    net, x = nn.Linear(3, 1), torch.ones(4, 3)
    steps = [lambda x: net(x).sum() / 4, lambda x: net(x).sum() / x.shape[0]]
    for _ in range(2):
        found = [pfeife.capture(step, x, cache=tmp_path) for step in steps]
        assert [port.reduction for one in found for port in one.outputs[:1]] == ["sum", "mean"]
        torch._dynamo.reset()


def test_parts_of_tensors(tmp_path):
    net, x = nn.Linear(3, 4), torch.ones(2, 3)
    pfeife.capture(lambda x: net(x)[..., None, 1:3].sum(), x, cache=tmp_path)
    assert keys(tmp_path)


SWITCHES = {
    "set_default_dtype": [torch.float64],
    "use_deterministic_algorithms": [True],
    "set_num_threads": [2],
    "set_float32_matmul_precision": ["high"],
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_of_torch(tmp_path, switch):
    before = {
        "set_default_dtype": torch.get_default_dtype(),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "set_num_threads": torch.get_num_threads(),
        "set_float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    net, x = nn.Linear(3, 3), torch.ones(2, 3)
    pfeife.capture(lambda x: net(x).sum(), x, cache=tmp_path)
    try:
        getattr(torch, switch)(*SWITCHES[switch])
        torch._dynamo.reset()
        pfeife.capture(lambda x: net(x).sum(), x, cache=tmp_path)
    finally:
        getattr(torch, switch)(before[switch])
    assert len(keys(tmp_path)) == 2


@pytest.mark.parametrize("name", ["__version__", "version.git_version"])
def test_versions_of_torch(tmp_path, monkeypatch, name):
    net, x = nn.Linear(3, 3), torch.ones(2, 3)
    pfeife.capture(lambda x: net(x).sum(), x, cache=tmp_path)
    monkeypatch.setattr(f"torch.{name}", "2.13.1")
    torch._dynamo.reset()
    pfeife.capture(lambda x: net(x).sum(), x, cache=tmp_path)
    assert len(keys(tmp_path)) == 2


def test_our_own_code(tmp_path):
    """While it is worked on, the version stays."""
    (tmp_path / "inside").mkdir()
    seen = set()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "inside" / "one.py").write_text(text)
        sources.cache_clear()
        seen.add(sources(tmp_path))
    sources.cache_clear()
    assert len(seen) == 2


@torch.library.custom_op("pfeife_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def keeping(context, op, *args, **kwargs):
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(keeping)


def checkpointed(function, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, x, use_reentrant=False, context_fn=selective)


@pytest.mark.parametrize(
    "function, around",
    [
        (twice, contextlib.nullcontext()),
        (torch.relu, Doubling()),
        (torch.relu, torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
        (lambda x: checkpointed(torch.tanh, x), contextlib.nullcontext()),
    ],
    ids=["a custom operation", "a mode", "saved tensors", "a policy of checkpoints"],
)
def test_what_runs_code_of_others_is_not_kept(tmp_path, function, around):
    """What that code does may change, and no graph would show it."""
    net, x = nn.Linear(3, 3), torch.ones(2, 3)

    def step(x):
        return function(net(x)).sum()

    for cache in (tmp_path, None):
        torch._dynamo.reset()
        with around, contextlib.suppress(ValueError):
            pfeife.capture(step, x, cache=cache)
    assert not keys(tmp_path)


def test_replaced_functions_of_torch(tmp_path, monkeypatch):
    """Dynamo leaves some of torch's functions whole, which call others by their names."""
    net, x = nn.Linear(3, 3), torch.ones(2, 3)
    monkeypatch.setattr(F, "softmin", lambda x, dim=None: x)
    pfeife.capture(lambda x: net(x).sum(), x, cache=tmp_path)
    assert not keys(tmp_path)


def test_replaced_kernels_of_torch(tmp_path):
    net, x = nn.Linear(3, 3), torch.ones(2, 3)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("trace", lambda x: x.sum(), "AutogradCPU")
        pfeife.capture(lambda x: net(x).sum(), x, cache=tmp_path)
    assert not keys(tmp_path)
    torch._dynamo.reset()
    pfeife.capture(lambda x: net(x).sum(), x, cache=tmp_path)
    assert len(keys(tmp_path)) == 1
