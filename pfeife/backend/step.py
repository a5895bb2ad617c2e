"""`pfeife.compile`: cuts a call's batch first, and captures the step on a microbatch."""

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import attrs
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.backend.building.residence import residence
from pfeife.backend.entry import Backend, backend
from pfeife.backend.graphs import Losses, MicrobatchGraph, NotOpen
from pfeife.backend.pipelined import P, PipelinedStep, R
from pfeife.backend.settings.declared import mark_declared
from pfeife.backend.settings.options import Capture, Options
from pfeife.backend.settings.options_typed import Asked
from pfeife.backend.state.values import with_values
from pfeife.backend.step_modules import given_by, hooks_of, modules_of, numbers_in, wrong_norms
from pfeife.backend.steps import Steps
from pfeife.frontend.arguments import Inputs, describe
from pfeife.frontend.batch import Arguments, Cutter, function_of
from pfeife.frontend.captured import Door, neither, taken
from pfeife.frontend.checks.capture_view import CaptureView
from pfeife.frontend.checks.restore import set_states, torchs_states
from pfeife.frontend.checks.side_effects import check_again, check_settled
from pfeife.frontend.dynamo import copied, dynamo_forward, dynamo_graph, plain_error
from pfeife.frontend.forward import Forward
from pfeife.frontend.trace.guards import Guard
from pfeife.frontend.trace.open_sizes import open_places
from pfeife.frontend.trace.traced import kind_of
from pfeife.frontend.trace.tracing import Traced, traced
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.batches.rank_zero import CallOfRankZero, Sent
from pfeife.runtime.distributed.process_group import join_world, world_so_far
from pfeife.runtime.distributed.world import World
from pfeife.runtime.distributed.wrapped import check_alone
from pfeife.runtime.failure import CollectiveError, PipelineError

log = logging.getLogger("pfeife")


def compile(
    step: Callable[P, R], *, in_dims: Any = 0, **options: Unpack[Asked]
) -> PipelinedStep[P, R]:
    """A step that runs as a pipeline: torch.compile with this backend, for a loop as it is.

    `in_dims` says where the batch is in the arguments: as in torch.vmap for the positional ones
    (a number, None for nowhere, or a nested structure of them), or by name, `{"table": None}`;
    what is not said is cut along dimension 0. Every tensor that is cut has as many rows as the
    others, or a multiple where `in_dims` is given. The step is captured as one graph on the first
    microbatch of a call; a call compiles again when shapes, numbers or modes have changed.

    The result's `backend` attribute has what was compiled. Raises ValueError for wrong options,
    and at a call for what cannot be cut or captured.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> step = pfeife.compile(lambda x: net(x).square().mean(), microbatches=2, stages=2)
    >>> loss = step(torch.ones(8, 4))
    >>> loss.backward()
    >>> net[0].weight.grad.shape
    torch.Size([4, 4])
    >>> print(step.backend.compiled[0].plan.schedule.to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_one(function_of(step)) for is_one in kinds):
        name = function_of(step).__qualname__
        raise ValueError(f"{name} is a generator or async: a step returns its results")
    compiled = CompiledStep(step, in_dims, backend(**options))
    return PipelinedStep(step, compiled, compiled.backend)


class CompiledStep:
    """A step and what has been compiled of it. One call at a time: other threads wait."""

    runs = True  # what it builds

    def __init__(self, step: Callable[..., Any], in_dims: Any, backend: Backend):
        self.step, self.backend = step, backend
        options = backend.options
        self.cutter = Cutter(
            step, in_dims, options.microbatches, options.replicas, options.fit_smaller_batches
        )
        self.dynamic, self.most = options.dynamic, options.max_programs
        if options.dynamic is None and options.passes:  # which may look at shapes
            self.dynamic = False
        self.dynamo = self._whole_graph()
        homes = residence().home if options.devices else None
        self.presented = CaptureView(options.param_dtype, homes, options.devices or ())
        self.hooks: dict[int, Guard] = {}  # of modules, which Dynamo does not guard
        self.door: Capture = options.capture
        self.refused: Exception | None = None  # what Dynamo has said of a step that is traced
        self.told: Door | None = None  # what the log knows
        self.unsettled: tuple[str, Inputs] | None = None  # of a graph whose step sets numbers
        self.traced: list[tuple[Traced, Steps]] = []  # what was used last is the last
        self.name = self.cutter.name
        self.asked: Door | Literal["batch"] = "batch"  # what a call has been refused by
        self.lock = threading.RLock()
        self.call: Arguments | None = None
        self.of_rank_zero = CallOfRankZero(self.name)
        self.sent: Sent | None = None
        self.reached = self.has_values = self.waits = self.handed = self.dropped = False

    def _whole_graph(self) -> Callable[..., Any]:
        """The step for Dynamo, which knows nothing of it yet."""
        return _torch.whole_graph(self.step, self.graph, self.dynamic)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.lock:
            world = join_world(self._device(args, kwargs), self.backend.options.timeout)
            busy = world.building("a call of a compiled step") if world else None
            with busy or contextlib.nullcontext():
                result, error = self.attempt(args, kwargs, world)
        if error is not None:
            raise error
        self.backend.meter.tell()
        return result

    def attempt(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], world: World | None
    ) -> tuple[Any, Exception | None]:
        """The result of a call, or an error that all ranks know of. Raises all other errors."""
        self.reached, self.asked, self.handed = False, "batch", False
        try:
            options = self.backend.options_for(world)
            if world and options.batch == "rank0":
                args, kwargs, self.sent = self.of_rank_zero(world, args, kwargs)
            call = self.call = self.cutter(args, kwargs, options.apart)
            mark_declared(call.leaves, options.max_sizes, options.sizes_hint)
            self.presented.look(self.step, call.others, _device_of(call))
            if self.has_values:
                return self._checked(call, self._result(call)), None
            if world:
                check_alone([*modules_of(self.step), *call.others.values()])
            at_once = self.runs and world is None
            with with_values(self.step, call.others, at_once) as self.waits:
                result = self._checked(call, self._result(call))
            self.has_values = True
            return result, None
        except CollectiveError as error:
            if self.dynamic is None and self.handed:  # what other ranks have not seen change
                self.dynamo, self.hooks = self._whole_graph(), {}
            return None, error
        except PipelineError:
            raise
        except Exception as error:
            if self.reached:
                raise
            found = self.cutter.mismatch(args, kwargs) or plain_error(error)
            if world:
                found = wrong_norms(self.step, world) or found
                with contextlib.suppress(CollectiveError):
                    world.agreed("", "this call", refused=found)
            found.__cause__ = error if found is not error else error.__cause__
            return None, found
        finally:
            self.call, self.sent, self.waits = None, None, False

    def _result(self, call: Arguments) -> Any:
        """What the step returns, through the door that takes it."""
        if self.door == "trace":
            return self._told("trace", self._by_trace(call))
        try:
            return self._told("dynamo", self._by_dynamo_for_sizes(call))
        except (CollectiveError, PipelineError, _NotReached):
            raise
        except Exception as error:
            if self.reached or self.door == "dynamo":
                raise
            self.refused = plain_error(error)
        try:
            result = self._by_trace(call)
        except Exception as error:
            if self.reached:
                raise
            raise neither(self.refused, error, call.cut) from error
        self.door = "trace"
        return self._told("trace", result)

    def _told(self, door: Door, result: Any) -> Any:
        """The result; the log is told once how the step is captured."""
        if self.told != door:
            self.told, world = door, world_so_far()
            level = logging.DEBUG if world and world.rank else logging.INFO
            log.log(level, "%s", taken(self.name, door, self.refused))
        return result

    def _by_dynamo_for_sizes(self, call: Arguments) -> Any:
        """By Dynamo; where it fails with sizes that it has found to change, from now on with a
        graph for each of them."""
        try:
            return self._by_dynamo(call)
        except (CollectiveError, PipelineError, _NotReached):
            raise
        except Exception as error:
            is_full = _torch.is_limit_of_compilations(error) and self._has_sizes()
            goes_on = self.told == "dynamo" and (self.dynamic is None or is_full)
            if self.reached or not goes_on:
                raise
            log.debug("%s has a graph for each size, since: %s", self.name, error)
        if is_full:
            self._tell_of_drops()
            self.backend.forget()
        self.dynamic = False
        self.dynamo, self.hooks = self._whole_graph(), {}
        return self._by_dynamo(call)

    def _has_sizes(self) -> bool:
        """Whether programs differ in the sizes of the batch."""
        programs = (compiled.program for compiled in self.backend.compiled)
        return len({tuple(p.shape for p in one.ports(Role.BATCH)) for one in programs}) > 1

    def _by_dynamo(self, call: Arguments) -> Any:
        self.asked = "dynamo"
        if any(guard.broken() for guard in self.hooks.values()):
            self.dynamo, self.hooks = self._whole_graph(), {}
        with _torch.willing(self.most), self.presented.seen():
            result = self.dynamo(*call.args, **call.kwargs)
        unsettled, self.unsettled = self.unsettled, None
        if unsettled:
            self._everything()
            with self.presented.seen():
                check_settled(self.step, call, given_by(call.leaves), *unsettled)
        if not self.reached:
            raise _NotReached(
                f"the call of {self.name} has not reached Pfeife: it computes nothing with "
                "tensors, or torch.compile is turned off (TORCH_COMPILE_DISABLE, "
                "torch.compiler.set_stance)"
            )
        return result

    def _by_trace(self, call: Arguments) -> Any:
        """Runs what was traced of the step for such a call, or traces it. Where a trace has another
        answer than the call, another one is taken, with the same random numbers. (On ranks those
        that there are: each lacks parameters, without which nobody knows the answers.) Where there
        is no program of a new trace for several sizes, there is a trace for each."""
        self.asked = "trace"
        states, tried, refused = torchs_states(), list[Traced](), ""
        while True:
            traced, steps, is_new = self._fitting(call, tried, refused)
            try:
                return traced.returned(self._run(steps, traced.values(call.leaves)))
            except PipelineError:
                raise
            except (ValueError, IndexError, RuntimeError) as error:
                found = traced.unfit(error)
                if any(isinstance(e, NotOpen) for e in (error, error.__cause__)):
                    if is_new:  # sizes are closed, then; else those of this call may be open
                        refused = str(error)
                        self.traced.pop()
                elif found is error:
                    raise
                elif is_new or (world_so_far() and not self._untried(call, [*tried, traced])):
                    raise found from error
                tried.append(traced)
                log.debug("%s is traced anew: %s", self.name, found)
            set_states(states)

    def _fitting(
        self, call: Arguments, tried: Sequence[Traced], refused: str
    ) -> tuple[Traced, Steps, bool]:
        """What was traced last of those that hold for a call and were not tried, or a new trace;
        `refused` says why its sizes are not open, "" if they may be."""
        with self.presented.seen():
            found = self._untried(call, tried)
        if not found and len(self.traced) == self.most:
            self._drop_oldest(call)
        if found:
            self.traced.remove(found)
        else:
            log.debug("%s is traced because of %s", self.name, self._broken(call))
        self.traced.append(found or self._traced(call, refused))
        return *self.traced[-1], not found

    def _drop_oldest(self, call: Arguments) -> None:
        """Makes room for a trace of other sizes. Raises ValueError where something else is another
        one with every call."""
        last = self.traced[-1][0]
        if last.kind != kind_of(call) or not last.sizes.broken(call):
            raise ValueError(
                f"{self.name} has been traced {self.most} times, the last time because of "
                f"{self._broken(call)}: keep what changes with every call in a tensor"
            )
        _, steps = self.traced.pop(0)
        steps.close()
        self._tell_of_drops()

    def _tell_of_drops(self) -> None:
        """Says once that not all programs are kept."""
        world = world_so_far()
        if not self.dropped and not (world and world.rank):
            log.warning(
                "%s has been captured for %d sizes, each with a program of its own: from now on "
                "earlier ones are dropped (max_programs=%d)",
                *(self.name, self.most, self.most),
            )
        self.dropped = True

    def _untried(self, call: Arguments, tried: Sequence[Traced]) -> tuple[Traced, Steps] | None:
        """What was traced last of those that hold for a call and were not tried."""
        known = (one for one in reversed(self.traced) if one[0] not in tried)
        return next((one for one in known if not one[0].broken(call)), None)

    def _broken(self, call: Arguments) -> str:
        """Why the last trace does not hold for a call."""
        if not self.traced:
            return "nothing was traced"
        return self.traced[-1][0].broken(call) or "the values of tensors that it asks for"

    def _traced(self, call: Arguments, refused: str) -> tuple[Traced, Steps]:
        """A new trace for a call: of its kind, those sizes are open that are others now, unless
        they were `refused`."""
        self._everything()
        kind = kind_of(call)
        known = [one for one, _ in self.traced if one.kind == kind]
        sizes = [one.sizes for one in known]
        places = {}
        if not refused and not any(one.refused for one in sizes):
            places = open_places(call, [one.shapes for one in sizes], self.dynamic)
        # On ranks, each of which lacks parameters by then, the answers are those of before.
        warm = known[-1].warm if known and world_so_far() else None
        with self.presented.seen(values=True):
            found = traced(self.step, call, places=places, warm=warm)
        if refused:
            found = attrs.evolve(found, sizes=attrs.evolve(found.sizes, refused=refused))
        self.presented.check(found.inputs)

        def grown(times: int) -> tuple[Forward, Inputs]:
            assert self.call is not None
            leaves = self.call.grown(times)
            args, kwargs = self.call.made(leaf.first for leaf in leaves)
            call = attrs.evolve(self.call, leaves=leaves, args=args, kwargs=kwargs)
            with self.presented.seen(values=True):
                larger = traced(self.step, call)
            return larger.forward, larger.inputs

        frame = getattr(function_of(self.step), "__code__", type(self.step))
        losses = Losses(found.forward, self.backend.losses, frame)
        graph = MicrobatchGraph(
            found.forward, found.inputs, grown, losses, "trace", self.cutter.said
        )
        return found, Steps(self.backend, graph, self.name, self._settle)

    def _run(self, steps: Steps, values: Sequence[Any]) -> list[torch.Tensor]:
        """A call of what was built, with the whole batch."""
        assert self.call is not None
        self.reached = True
        self.presented.put_back()
        world = world_so_far()
        apart = self.backend.options_for(world).apart
        options = self.backend.options_for(world, self.call.microbatches * apart)
        if self.waits or self.presented.is_apart:  # there are no values to check with
            options = attrs.evolve(options, check=False)
        return self.run(steps, values, options)

    def run(self, steps: Steps, values: Sequence[Any], options: Options) -> list[torch.Tensor]:
        """The results of a call of what was built, or is built for it."""
        return steps(values, options, self.sent)

    def _settle(self, state: Sequence[tuple[str, torch.Tensor, torch.device]]) -> None:
        """Brings parameters and buffers to the devices of their stages."""
        self.presented.add(residence().settle(state, self.presented.device))

    def _everything(self) -> None:
        """Before a rank reads the batch by itself: what rank 0 has been given comes to all."""
        if self.sent:
            self.sent.everything()

    def graph(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Called by Dynamo with the graph of a microbatch."""
        assert self.call is not None
        self.handed = True
        forward = dynamo_forward(module)
        if any(isinstance(value, torch.SymInt) for value in forward.results):
            raise ValueError("the step returns a size of its arguments: say dynamic=False")
        inputs = describe(module, examples, given=given_by(self.call.leaves))
        self.presented.check(inputs)
        changed = {name for _, name, *_ in _torch.changed_attributes()}
        new = inputs.numbers.keys() - inputs.settled
        others = {name for name in new if name.rpartition(".")[2] not in changed}
        if others and self.call.microbatches > 1:
            self.unsettled = str(module.graph), inputs
        self.hooks |= hooks_of(inputs.modules)
        losses = Losses(forward, self.backend.losses, _torch.frame())
        graph = MicrobatchGraph(forward, inputs, self._grown, losses, "dynamo", self.cutter.said)
        new_steps = Steps(self.backend, graph, self.name, self._settle)
        steps = self.backend.known_steps(new_steps, module)
        unsure = bool(changed or _torch.changed_containers())

        def run(*args: Any) -> list[torch.Tensor]:
            nonlocal unsure
            assert self.call is not None
            if unsure and self.call.microbatches > 1:
                self._check_again(self.call)
            unsure = False
            return self._run(steps, [self.call.whole(value) for value in args])

        return run

    def _check_again(self, call: Arguments) -> None:
        """Raises CollectiveError for attributes that the step sets and that make a difference."""
        self._everything()
        self.presented.put_back()
        try:
            with self.presented.seen(values=True):
                check_again(self.step, call)
        except ValueError as error:
            raise CollectiveError(str(error)) from error  # of all ranks, which run the same Python

    def _grown(self, times: int) -> tuple[Forward, Inputs]:
        """Dynamo's graph of a microbatch with so many times as many rows, and its inputs."""
        assert self.call is not None
        leaves = self.call.grown(times)
        args, kwargs = self.call.made(leaf.first for leaf in leaves)

        def read(module: fx.GraphModule, examples: list[Any]) -> tuple[Forward, Inputs]:
            return dynamo_forward(copied(module)), describe(
                module, examples, given=given_by(leaves)
            )

        with self.presented.seen():
            return dynamo_graph(self.step, args, kwargs, read)

    def _checked(self, call: Arguments, result: Any) -> Any:
        """The result with the caller's own tensors in place of their first microbatches. Raises
        ValueError for numbers that Python has computed of one microbatch."""
        numbers = list(numbers_in(result)) if call.microbatches > 1 else []
        if numbers:
            raise ValueError(
                f"the step returns the number {numbers[0]!r}, which Python has computed of one "
                "microbatch; return tensors only"
            )
        call.widen()
        return pytree.tree_map(call.whole, result)

    def _device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Where the step's parameters are, as far as can be told before it is captured; else
        where the first tensor among the arguments is."""
        for holder in modules_of(self.step):
            for parameter in holder.parameters():
                return parameter.device
        tensors = (v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _device_of(call: Arguments) -> torch.device:
    """Where the batch is."""
    tensors = (leaf.first for leaf in call.leaves if isinstance(leaf.first, torch.Tensor))
    return next((one.device for one in tensors), torch.device("cpu"))


class _NotReached(ValueError):
    """Raised where torch.compile has not asked for anything to be compiled."""
