"""Virtual accelerators: layers whose operations sleep, so that many ranks fit on few cores.

A layer scales its input by its weight. Its forward, the gradient of its input and the gradient of
its weight are three operations; each returns a fixed time after it started, as if another device
had worked. Only the first row of a value is computed: the others stand for bytes that have to
travel, and cost this machine nothing else.
"""

import statistics
import time

import torch
from torch import fx, nn

WIDTH = 256  # of a value's rows, which are 1 KB each


class Device:
    """How long a layer of one unit takes: `seconds` is set once, before anything runs."""

    seconds = 0.01


def _wait(start: float, units: int) -> None:
    left = start + units * Device.seconds - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _first_row(like: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(like)
    result[:1] = row
    return result


def forward(x: torch.Tensor, weight: torch.Tensor, units: int) -> torch.Tensor:
    start = time.perf_counter()
    result = _first_row(x, x[:1] * weight[:1])
    _wait(start, units)
    return result


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor, units: int) -> torch.Tensor:
    return forward(gradient, weight, units)


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor, rows: int, units: int) -> torch.Tensor:
    start = time.perf_counter()
    result = gradient.new_zeros(rows, WIDTH)
    torch.mul(gradient[:1], x[:1], out=result[:1])
    _wait(start, units)
    return result


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """The loss: of the first row, and free of charge."""
    return x[:1].square().mean()


def mean_square_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _first_row(x, x[:1] * (2 * gradient / WIDTH))


_LIBRARY = torch.library.Library("virtual", "DEF")
_SHAPES = {
    forward: lambda x, weight, units: torch.empty_like(x),
    input_gradient: lambda gradient, weight, units: torch.empty_like(gradient),
    weight_gradient: lambda gradient, x, rows, units: gradient.new_empty((rows, WIDTH)),
    mean_square: lambda x: x.new_empty(()),
    mean_square_gradient: lambda gradient, x: torch.empty_like(x),
}
for _kernel, _shape in _SHAPES.items():
    _LIBRARY.define(torch.library.infer_schema(_kernel, mutates_args=(), op_name=_kernel.__name__))
    _LIBRARY.impl(_kernel.__name__, _kernel, "CPU")
    torch.library.register_fake(f"virtual::{_kernel.__name__}", _shape)
OPS = torch.ops.virtual


def _save(ctx, inputs, output):
    *tensors, ctx.units = inputs
    ctx.rows = len(tensors[1])
    ctx.save_for_backward(*tensors)


def _gradients(ctx, gradient):
    x, weight = ctx.saved_tensors
    to_input = OPS.input_gradient(gradient, weight, ctx.units) if ctx.needs_input_grad[0] else None
    return to_input, OPS.weight_gradient(gradient, x, ctx.rows, ctx.units), None


def _save_input(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _loss_gradient(ctx, gradient):
    return OPS.mean_square_gradient(gradient, *ctx.saved_tensors)


torch.library.register_autograd("virtual::forward", _gradients, setup_context=_save)
torch.library.register_autograd("virtual::mean_square", _loss_gradient, setup_context=_save_input)


class _Input(torch.autograd.Function):
    """Hands the input on; its gradient is an operation of its own."""

    @staticmethod
    def forward(ctx, x, weight, units):
        ctx.save_for_backward(weight)
        ctx.units = units
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return OPS.input_gradient(gradient, *ctx.saved_tensors, ctx.units), None, None


class _Weight(torch.autograd.Function):
    """An empty value of the output's shape that the weight's gradient flows through."""

    @staticmethod
    def forward(ctx, weight, x, units):
        ctx.save_for_backward(x)
        ctx.rows, ctx.units = len(weight), units
        return weight.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        return OPS.weight_gradient(gradient, *ctx.saved_tensors, ctx.rows, ctx.units), None, None


class _Both(torch.autograd.Function):
    """The forward; its gradient goes to both, so that each can be asked for alone."""

    @staticmethod
    def forward(ctx, x, weight, units, through):
        return OPS.forward(x, weight, units)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, gradient


class Layer(nn.Module):
    """A layer that takes some units of time for its forward and for each of its gradients.

    Captured, it is one operation whose gradients are two; run as it is, three nodes of autograd,
    of which torch.distributed.pipelining can run the gradients apart. Its weight has some `rows` of
    1 KB, of which only the first is used.
    """

    def __init__(self, units: int = 1, rows: int = 1):
        super().__init__()
        self.units = units
        self.weight = nn.Parameter(torch.rand(rows, WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return OPS.forward(x, self.weight, self.units)
        fixed, units = self.weight.detach(), self.units
        through = _Weight.apply(self.weight, x.detach(), units)
        return _Both.apply(_Input.apply(x, fixed, units), fixed, units, through)


_SLEEPING = {OPS.forward.default, OPS.input_gradient.default, OPS.weight_gradient.default}


def units(body: fx.GraphModule) -> int:
    """How many units of time the operations of a body sleep."""
    return sum(node.args[-1] for node in body.graph.nodes if node.target in _SLEEPING)


def seconds_alone(rows: int, repeats: int = 20) -> float:
    """What a unit takes when nothing else runs: sleeps end some microseconds late."""
    x, weight = torch.rand(rows, WIDTH), torch.rand(1, WIDTH)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        OPS.forward(x, weight, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
