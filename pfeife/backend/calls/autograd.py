"""A call as a node of the user's autograd graph."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.backend.building.compiled import Compiled
from pfeife.backend.calls.call import Call, Ran, Results, Slots, as_backward, forward, tell
from pfeife.backend.settings.options import Options
from pfeife.backend.shared.meter import Meter
from pfeife.data.progress import Shown
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.runtime.distributed.batches.rank_zero import Sent
from pfeife.runtime.distributed.process_group import world_so_far

log = logging.getLogger("pfeife")
Gradients = tuple[torch.Tensor | None, ...]


def run_step(
    compiled: Compiled,
    options: Options,
    args: Sequence[Any],
    meter: Meter,
    begun: float,
    seed: int = 0,
    show: Shown | None = None,
    sent: Sent | None = None,
) -> list[torch.Tensor]:
    """One call of the compiled step: results in Dynamo's order, wired to autograd. `show` is
    given for the first one, which takes longest; `sent` has what rank 0 alone was given. It has
    `begun` at that moment of the `meter`."""
    captured = compiled.captured
    slots = {name: arg for name, arg in zip(captured.arguments, args, strict=True) if name}
    call = Call(compiled, options, meter, seed, show, sent)
    if captured.program.ports(Role.TANGENT) and torch.is_grad_enabled():
        ran, results = _with_gradients(call, slots)
    else:
        ran, _, results, _ = forward(call, slots)
    ran.measured(begun, ran.figures)
    named = dict(zip(captured.results, results, strict=True))
    # What the step changes in place is returned as the very tensor that the caller has.
    own = {captured.carried[name]: slots[name] for name in captured.in_place}
    return list((named | own).values())


def _with_gradients(call: Call, slots: Slots) -> tuple[Ran, Results]:
    """Runs a call, and makes it a node of the user's autograd graph."""
    compiled = call.compiled
    # Those whose gradients are made here. Others get theirs on their own ranks: autograd must not
    # touch them here.
    leaves = {p.fqn: slots[p.name] for p in compiled.leaves}
    if compiled.microbatches > 1 and "hooks" not in compiled.said:
        _warn_of_hooks(compiled, leaves)
    if not leaves:  # the results have a backward on every rank
        leaves[""] = torch.empty(0, requires_grad=True)
    # Autograd sees one node. What happens inside is the program's own backward.
    with torch.no_grad():
        ran, result, results, again = forward(attrs.evolve(call, leaves=tuple(leaves)), slots)
    if call.inside:
        gradients = [None if g is None else g.data for g in ran.gradients(result)]
        overflow = result.overflow
        del result  # whose gradients autograd has from here on
        with ran.saved.saving(again) if ran.saved and again else contextlib.nullcontext():
            return ran, _LossInside.apply(ran, results, gradients, overflow, *leaves.values())
    later = [slots[name] for name in compiled.read_later]
    return ran, _LossOutside.apply(ran, results, later, *leaves.values())


def _warn_of_hooks(compiled: Compiled, leaves: Mapping[str, torch.Tensor]) -> None:
    parameters = (port.fqn for port in compiled.leaves if port.role == Role.PARAMETER)
    hooked = next((name for name in parameters if _torch.hooks_of(leaves[name])), None)
    if hooked is not None:
        compiled.said.add("hooks")
        log.warning(
            "the hooks of parameter %s run once a call, on the gradient of all microbatches", hooked
        )


class _LossInside(torch.autograd.Function):
    """A whole step as one node of the user's autograd graph. Its gradients wait among autograd's
    saved tensors, which are freed by the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        ran: Ran,
        results: Results,
        gradients: list[torch.Tensor | None],
        overflow: torch.Tensor | None,
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # The first one is there on every rank: with it goes what runs the step again.
        ctx.save_for_backward(torch.empty(0), *gradients)  # as no views, which keep their bases
        ctx.elsewhere, ctx.overflow = ran.elsewhere, overflow
        ctx.ran = ran if ran.saved else None
        gradients.clear()  # autograd has them, and its backward frees them
        return _wired(ctx, ran, results)

    @staticmethod
    @as_backward()
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> Gradients:
        _check_backward(ctx.captured.program)
        # Before any gradient is handed out.
        _check_accumulates(ctx, ctx.elsewhere)
        _, *gradients = ctx.saved_tensors
        # Gradients exist for the loss alone; what flows into another result would be lost in
        # silence.
        at = ctx.captured.results.index("loss")
        others = [i for i, g in enumerate(arrived) if g is not None and i != at]
        if others:
            attribute = ctx.captured.kept.get(ctx.captured.results[others[0]])
            what = f"attribute {attribute.name}" if attribute else f"result {others[0]}"
            raise RuntimeError(
                f"{what} of the step received a gradient, but result {at} was "
                "taken as the loss and only its gradient is computed: return the whole loss, "
                'or say with loss= which result it is, or loss="outside" if none is'
            )
        # What arrives is d(outer)/d(loss), a number: all gradients are that times as large.
        scale, overflow = arrived[at], ctx.overflow
        if scale is None:  # nothing of what was differentiated came from the loss
            return (None,) * (4 + len(gradients))
        world = world_so_far()
        if world is not None:  # which the ranks compare before the next call
            world.ownership.factors.append(scale.detach())
        if ctx.ran is None:
            # The gradients are those of the loss itself; what arrives for it is a factor of all.
            gradients = _multiplied(gradients, scale)
        elif ctx.ran.is_other(float(scale)):
            gradients = []  # there is room for one set of them
            gradients, overflow = ctx.ran.run_again(float(scale))
        tell(ctx.elsewhere, overflow)
        return (None, None, None, None, *gradients)


class _LossOutside(torch.autograd.Function):
    """A step whose backwards run when the gradients of its results arrive. What they read of the
    caller's tensors is saved, so that autograd sees if it was changed in place in between."""

    @staticmethod
    def forward(
        ctx: Any,
        ran: Ran,
        results: Results,
        read_later: Sequence[torch.Tensor],
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*read_later)
        ctx.ran = ran
        return _wired(ctx, ran, results)

    @staticmethod
    @as_backward()
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> Gradients:
        _check_backward(ctx.captured.program)
        _check_accumulates(ctx, ctx.ran.elsewhere if ctx.ran else ())
        ran, ctx.ran = ctx.ran, None
        if ran is None:
            ctx.saved_tensors  # noqa: B018  raises unless the graph was retained
            raise RuntimeError(
                "backward ran a second time through one call of a pipelined step; with the loss "
                "outside its activations are gone: call the step again"
            )
        meter = ran.call.meter
        # What was between the call and its backward is time of the loop.
        begun = meter.begin()
        with ran.step.preparing():
            ctx.saved_tensors  # noqa: B018  raises if one was changed in place
            tangents = ran.tangents(arrived)
            ran.step.compare(tangents, values=ran.call.options.compare_batches)
            ran.step.set_tangents(tangents)
        gradients, figures = ran.backward()
        ran.measured(begun, figures)
        meter.tell()
        return (None, None, None, *gradients)


def _multiplied(
    gradients: Sequence[torch.Tensor | None], factor: torch.Tensor
) -> list[torch.Tensor | None]:
    """What autograd has saved, times a factor. Where this backward frees it and nobody else has its
    memory, that is written to, and becomes `p.grad`: there is no second set of gradients."""
    there = [gradient for gradient in gradients if gradient is not None]
    # A graph that is retained gives its gradients once more.
    ours = set() if _torch.keeps_graph() else _alone(there)

    def multiplied(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(factor) if id(gradient) in ours else gradient * factor

    return [None if gradient is None else multiplied(gradient) for gradient in gradients]


def _alone(gradients: Sequence[torch.Tensor]) -> set[int]:
    """The ids of those whose memory has these gradients alone, each in a place of its own: one, or
    those of a bucket that replicas have added up."""
    memories: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.layout == torch.strided:
            memories.setdefault(gradient.untyped_storage().data_ptr(), []).append(gradient)
    return {id(part) for parts in memories.values() if _fill_memory(parts) for part in parts}


def _fill_memory(parts: Sequence[torch.Tensor]) -> bool:
    """Whether tensors of one memory are all that look at it, do not overlap, and are most of it:
    as `p.grad` they keep all of it."""
    size, used = parts[0].untyped_storage().nbytes(), sum(part.nbytes for part in parts)
    # Somebody else holds a view: to write into the memory would change what he has.
    if _torch.views_of_memory(parts[0]) != len(parts):
        return False
    if len(parts) == 1 and used == size:
        return True
    places = sorted((part.storage_offset(), part.numel()) for part in parts)
    # A bucket that is mostly used may be kept whole; a small part of one would keep all of it
    # alive.
    apart = all(at + many <= after for (at, many), (after, _) in pairwise(places))
    return apart and 2 * used > size and all(part.is_contiguous() for part in parts)


def _wired(ctx: Any, ran: Ran, results: Results) -> Results:
    """The results as those of a node of autograd's. The node does not keep them: they keep it."""
    captured = ctx.captured = ran.call.compiled.captured
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(results[index] for index in captured.detached))
    return results


def _check_accumulates(ctx: Any, elsewhere: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError for `torch.autograd.grad`, which would hand out the gradients of this
    rank's parameters alone."""
    if elsewhere and any(_torch.is_handed_out(node) for node, _ in ctx.next_functions if node):
        raise RuntimeError(
            "torch.autograd.grad of a pipelined step: other ranks have the gradients of a part of "
            "the parameters; call loss.backward() and use p.grad, whose norms and elements are "
            "those of all ranks"
        )


def _check_backward(program: Program) -> None:
    """Raises RuntimeError for what eager's backward would do and that of a step cannot."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a pipelined step has no second derivatives: backward without create_graph"
        )
    for kind in sorted({port.device.type for port in program.inputs}):
        if torch.is_autocast_enabled(kind):
            raise RuntimeError(
                "backward was called under autocast, where eager would cast it too; a pipelined "
                "step's backward runs outside, as torch.amp asks for: call it after the autocast "
                f'block, or under torch.autocast("{kind}", enabled=False)'
            )
