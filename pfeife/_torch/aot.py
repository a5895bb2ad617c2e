"""AOTAutograd: the joint graph of a step, and how captured operations run."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
from torch._C import DispatchKey
from torch._dispatch.python import no_python_dispatcher

# The joint graph with a descriptor on every input and output. The public export APIs give
# either no backward or positional argument lists. If it moves: torch._functorch.aot_autograd.
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# torch's rule for the layout of a result, and for shapes in Python.
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch.fx.node import has_side_effect

from pfeife._torch.missing_rules import flops
from pfeife._torch.sizes import with_assertions


@contextlib.contextmanager
def as_eager() -> Iterator[None]:
    """While tracing takes interpolation, recurrent layers and batch norms apart as eager does. Else
    the first becomes indexing, which is slower than PyTorch's kernels and rounds otherwise (it is
    meant for shapes that are not known), the second lose the dropout between layers (2.11 to 2.15)
    and take other kernels, and the third do not take cuDNN's. In C++ interpolation takes sizes that
    are open for numbers, by a factor, or has no rule for them, in gradients: there are such in
    Python. If `py_kernels` moves: torch._ops.OpOverload.py_impl; if the rules do: such a step has a
    program for each size."""
    aten = torch.ops.aten
    names = [n for n in dir(aten) if n.startswith(("upsample_", "_upsample_"))]
    resizing = [getattr(aten, name) for name in names]
    packets = [*resizing, *(getattr(aten, n) for n in ("lstm", "gru", "rnn_tanh", "rnn_relu"))]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    norms = [aten.native_batch_norm.default, aten.cudnn_batch_norm.default]
    key = DispatchKey.CompositeImplicitAutograd
    kinds = ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    gradients = [getattr(aten, f"upsample_{kind}_backward").default for kind in kinds]
    with contextlib.ExitStack() as stack:
        # torch looks into these very dicts: they are filled again, not replaced.
        stack.enter_context(patch.dict(op_implementations_dict))
        for operator in (*operators, *norms):
            stack.callback(operator._dispatch_cache.clear)  # after the kernels are back
            stack.enter_context(patch.dict(operator.py_kernels))
        for operator in operators:
            # What takes them apart when they are traced are kernels in Python for these two keys.
            # Without them the dispatcher goes on to C++, as in eager, once it has forgotten its
            # last choice.
            operator.py_kernels.pop(DispatchKey.Autograd, None)
            operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        for packet in resizing:
            if "vec" in packet.overloads():
                packet.vec.py_kernels[key] = functools.partial(_resized, packet.default)
        for norm in norms:
            taken_apart = norm.py_kernels[DispatchKey.Autograd]
            kernel = functools.partial(_normalised, norm, taken_apart)
            norm.py_kernels[DispatchKey.Autograd] = kernel
            norm._dispatch_cache.clear()
        op_implementations_dict.update(dict.fromkeys(gradients, _gradient_of_image))
        yield


def _resized(operator: Any, image: torch.Tensor, sizes: Any, *options: Any) -> Any:
    """Interpolation to some `sizes`, or by factors, the last of the `options`: by the `operator`
    that takes both, as torch's own code calls it."""
    *flags, factors = options
    if factors is None:
        return operator(image, sizes, *flags)
    if sizes is None:
        pairs = zip(image.shape[2:], factors, strict=True)
        sizes = [_times(size, factor) for size, factor in pairs]
    return operator(image, sizes, *flags, *factors)


def _normalised(
    operator: Any,
    taken_apart: Callable[..., Any],
    image: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    *others: Any,
) -> Any:
    """A batch norm, by eager's kernels. `operator` is what eager computes it by, which does not say
    that it writes the running statistics; `taken_apart` what torch's tracing makes of it."""
    training, *numbers = others[1:]
    aten = torch.ops.aten
    results = len(operator._schema.returns)
    if training and not any(value is None for value in (weight, bias, mean)):
        norm = aten._batch_norm_with_update.default  # says so, and chooses kernels as eager does
        return norm(image, weight, bias, mean, others[0], *numbers)[:results]
    if operator is not aten.cudnn_batch_norm.default:
        return taken_apart(image, weight, bias, mean, *others)
    with no_python_dispatcher():  # or it is taken apart after all
        return operator(image, weight, bias, mean, *others)


def _gradient_of_image(
    mode: Any, operator: Any, gradient: torch.Tensor, to: Any, sizes: Any, *options: Any
) -> torch.Tensor:
    """Without storage, the gradient of an image of some `sizes`."""
    layout = suggest_memory_format(gradient)
    like: dict[str, Any] = {"dtype": gradient.dtype, "device": gradient.device}
    with mode:
        return torch.empty(sizes, memory_format=layout, **like)


def _times(size: Any, factor: float) -> Any:
    """A size times a factor, rounded down."""
    if factor == int(factor):
        return size * int(factor)
    return torch.sym_int(size * factor)


def no_autocast() -> Any:
    """While captured operations run, which have their casts in the graph. torch's own compiled
    functions run so; if it moves: `torch.autocast(type, enabled=False)` for each device type."""
    return torch._C._DisableAutocast()


def joint_graph(module: torch.nn.Module, args: tuple) -> torch.fx.GraphModule:
    """The flat joint graph of a module; without gradients the forward graph alone.

    The forward is traced under the autocast of the caller, the backward outside of it, as eager
    runs it. If `backward_pass_autocast` moves: the backward of float32 islands is cast.
    """
    has_side_effect(_CHECK)  # which torch 2.11 drops, as it is not told so
    outside = torch._functorch.config.patch(backward_pass_autocast="off")
    with contextlib.ExitStack() as stack, as_eager(), outside:
        joint = aot_export_joint_with_descriptors(stack, module, args).graph_module
    _free_checks(joint.graph)
    return with_assertions(joint)


def _free_checks(graph: torch.fx.Graph) -> None:
    """Takes checks of linear algebra (whether a matrix could be inverted) out of the order in which
    AOTAutograd keeps all that has an effect, by a token from one to the next: they need none.

    before:  done = with_effects(token, check, info), returned with the results
    after:   check(info)

    If the tokens move: leave this out, and a step with linalg.solve is refused.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.with_effects and node.args[1] is _CHECK:
            with graph.inserting_before(node):
                check = graph.call_function(_CHECK, node.args[2:], node.kwargs)
            check.meta = {**node.meta, "val": None}
            # Whatever reads it takes the next token out of it, which is now the one from before.
            for part in list(node.users):
                part.replace_all_uses_with(node.args[0])
                graph.erase_node(part)
            graph.erase_node(node)
    output: Any = graph.output_node()
    pairs = list(zip(output.args[0], output.meta["desc"], strict=True))
    # A token that comes back as it went in has no effect left to keep in order.
    returned = [pair for pair in pairs if not (_is_token(pair[1]) and pair[0].op == "placeholder")]
    output.args = ([node for node, _ in returned],)
    output.meta["desc"] = [desc for _, desc in returned]
    for node in list(graph.nodes):
        if node.op == "placeholder" and _is_token(node.meta["desc"]) and not node.users:
            graph.erase_node(node)


def _is_token(desc: Any) -> bool:
    return "Token" in type(desc).__name__


_CHECK = torch.ops.aten._linalg_check_errors.default


def inductor(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable:
    """Inductor's code for a graph of aten operations. `torch.compile` would trace the graph by
    Dynamo first; `torch._inductor.standalone_compile` writes an artifact beside the caches."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, examples)  # other types for other modes
    return compiled


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """A FLOP formula by operation: those of torch.utils.flop_counter (whose table has no
    documented name), and of the CPU's kernels of attention and LSTMs and of products by groups,
    which that table lacks."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

    aten = torch.ops.aten
    extra = {
        aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    }
    return extra | flops() | flop_registry
