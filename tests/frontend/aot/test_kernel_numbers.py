"""Kernels that read numbers of data: what the graphs look like, and what is refused."""

import operator
import threading

import pytest
import torch
from torch import fx, nn

import pfeife
from pfeife import _torch
from pfeife.frontend.aot.kernel_numbers import read_numbers

aten = torch.ops.aten
BATCH_NORM, INSTANCE_NORM = torch.batch_norm, torch.instance_norm


def norm_of(program):
    """The batch norm of a program."""
    nodes = program.module.graph.nodes
    (norm,) = [node for node in nodes if "batch_norm_with_update" in str(node.target)]
    return norm


@pytest.mark.parametrize("door", ["dynamo", "trace"])
def test_a_batch_norm_reads_its_momentum(door):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    program = pfeife.capture(lambda x: net(x).square().mean(), torch.randn(4, 4), door=door)
    norm = norm_of(program)
    momentum = norm.args[5]
    assert momentum.target is operator.truediv and not norm.meta.get("custom")
    assert [port.name for port in program.outputs if port.role.value == "output"] == []
    assert not any(node.target is aten.scalar_tensor.default for node in program.module.graph.nodes)


def test_torchs_functions_are_themselves_again():
    def failing(x):
        raise ValueError("a reason")

    with pytest.raises(ValueError, match="a reason"):
        pfeife.capture(failing, torch.ones(2, 2))
    assert torch.batch_norm is BATCH_NORM and torch.instance_norm is INSTANCE_NORM
    assert "float" not in vars(nn.modules.batchnorm)


def test_threads_that_make_graphs():
    """The one that ends first leaves the other its readers, and never its numbers."""
    inside, ended = threading.Event(), threading.Event()
    seen = []

    def other():
        with _torch.numbers_for_kernels() as numbers:
            inside.set()
            ended.wait()
            seen.extend([torch.batch_norm is BATCH_NORM, len(numbers)])

    thread = threading.Thread(target=other)
    with _torch.numbers_for_kernels() as numbers:
        thread.start()
        inside.wait()
        mode = _torch.symbolic_mode()
        with mode:
            share = torch.ones((), device="cpu").item()
            torch.batch_norm(torch.ones(2, 2), None, None, None, None, True, share, 1e-5, False)
        assert len(numbers) == 1
    ended.set()
    thread.join()
    assert seen == [False, 0] and torch.batch_norm is BATCH_NORM


def joint(kernel, *, marks=(0,), through=()):
    """A joint graph with a result, a number and kernels that bear its mark."""
    graph = fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    tensor = graph.call_function(aten.scalar_tensor.default, (number,))
    for target in through:
        tensor = graph.call_function(target, (tensor,))
    for mark in marks:
        node = graph.call_function(*kernel(x))
        node.meta["custom"] = {_torch.MARK: mark, "mine": 1}
    descs = [_torch.PlainAOTOutput(idx=0), _torch.PlainAOTOutput(idx=1)]
    graph.output([x, tensor]).meta["desc"] = descs
    return fx.GraphModule(nn.Module(), graph), number


def cudnn(x):
    return aten.cudnn_batch_norm.default, (x, x, None, None, None, True, _torch.INSTEAD, 1e-5)


def native(x):
    return aten.native_batch_norm.default, (x, None, None, None, None, True, _torch.INSTEAD, 1e-5)


@pytest.mark.parametrize("kernel", [cudnn, native])
@pytest.mark.parametrize("through", [(), (aten.detach.default,)])
def test_kernels_that_read(kernel, through):
    module, number = joint(kernel, through=through)
    read_numbers(module, 1)
    (norm,) = [node for node in module.graph.nodes if "batch_norm" in str(node.target)]
    assert norm.args[6] is number and norm.meta["custom"] == {"mine": 1}
    output = module.graph.output_node()
    assert len(output.args[0]) == len(output.meta["desc"]) == 1


@pytest.mark.parametrize(
    "case",
    [
        {"kernel": native, "marks": ()},
        {"kernel": native, "marks": (0, 0)},
        {"kernel": native, "marks": (1,)},
        {"kernel": native, "through": (aten.neg.default,)},
        {"kernel": lambda x: (aten.relu.default, (x,))},
    ],
    ids=["nobody", "two", "another", "changed", "no momentum"],
)
def test_a_number_without_its_reader(case):
    """The other number would stay in the graph, in silence."""
    module, _ = joint(**case)
    with pytest.raises(ValueError, match="the step computes a momentum from values of tensors"):
        read_numbers(module, 1)


def test_two_traces_at_once_leave_pythons_float():
    first, second = _torch.floats(), _torch.floats()
    for one in (first, second):
        one.__enter__()
    assert "float" in vars(nn.modules.batchnorm)
    for one in (first, second):  # as two threads may, not in the order of a stack
        one.__exit__(None, None, None)
    assert "float" not in vars(nn.modules.batchnorm)
