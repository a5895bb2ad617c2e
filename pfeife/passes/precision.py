"""In what precision gradients are added up, and parameters are held."""

from collections.abc import Collection

import attrs
import torch
from torch import fx

from pfeife.ir.editing.copying import copied
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.nodes import returned
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.passes.compose import Pass


def accumulate_in(dtype: torch.dtype = torch.float32) -> Pass:
    """A pass of a flat program: gradients of a narrower floating type are added up in `dtype`.

        before  grad_weight bfloat16     every sum is rounded: the more microbatches, the more
        after   cast(grad_weight)        sums over microbatches, ranks and replicas in `dtype`

    Within a microbatch nothing changes: a weight that is used twice has the sum of both in its own
    type, as autograd adds them up. The results are of `dtype`; who hands them out rounds them once.
    Raises ValueError for a program of calls.

    >>> net = torch.nn.Linear(4, 1).bfloat16()
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4).bfloat16())
    >>> [str(port) for port in pfeife.accumulate_in(torch.float32)(flat).ports(Role.GRADIENT)]
    ['grad_weight: gradient weight float32 1x4 cpu', 'grad_bias: gradient bias float32 1 cpu']
    """

    def run(program: Program) -> Program:
        if program.calls:
            raise ValueError("accumulate_in is a pass of flat programs: take it before fuse()")
        results = returned(program.module)
        narrow = {
            port.name
            for port in program.ports(Role.GRADIENT)
            if _is_narrower(port.dtype, dtype) and _is_dense(results[port.name])
        }
        if not narrow:
            return program
        copy = copied(program.module, output=False)
        copy.graph.output(
            {
                name: _cast(node, dtype) if name in narrow else node
                for name, node in copy.read(results).items()
            }
        )
        outputs = (
            attrs.evolve(port, dtype=dtype) if port.name in narrow else port
            for port in program.outputs
        )
        return settle(attrs.evolve(program, module=copy.module(), outputs=tuple(outputs)))

    return run


def master_weights(dtype: torch.dtype = torch.float32, only: Collection[str] | None = None) -> Pass:
    """A pass of a program that computes with narrower parameters than there are: those of a
    narrower floating type (`only` these ports, all unless given) are held in `dtype` by whoever
    runs it, and cast once a step; an optimizer then steps what is held. Their gradients are added
    up in `dtype` too, see `accumulate_in`.

    >>> net = torch.nn.Linear(4, 1).bfloat16()
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4).bfloat16())
    >>> print(pfeife.master_weights(torch.float32)(flat).inputs[0])
    weight: parameter weight bfloat16 1x4 cpu of float32
    """

    def run(program: Program) -> Program:
        def held(port: Port) -> Port:
            wanted = port.role == Role.PARAMETER and (only is None or port.name in only)
            narrower = wanted and _is_narrower(port.dtype, dtype)
            return attrs.evolve(port, held=dtype) if narrower else port

        return attrs.evolve(summed(program), inputs=tuple(map(held, program.inputs)))

    summed = accumulate_in(dtype)
    return run


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < other.itemsize


def _is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = node.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    # The line of the model and the tag of a backward go along; `settle` tells the value anew.
    cast.meta = {name: value for name, value in node.meta.items() if name not in ("val", "sizes")}
    return cast
