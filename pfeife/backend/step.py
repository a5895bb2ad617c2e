"""`pfeife.compile`: cuts a call's batch first, and captures the step on a microbatch."""

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any, Literal

import attrs
import torch
from torch.utils import _pytree as pytree

from pfeife.backend.building.residence import residence
from pfeife.backend.building.sync_batch_norm import wrong_norms
from pfeife.backend.doors.by_dynamo import DynamoDoor, NotReached
from pfeife.backend.doors.by_trace import TraceDoor
from pfeife.backend.doors.doorway import Doorway
from pfeife.backend.doors.invocation import Invocation
from pfeife.backend.entry import Backend, backend
from pfeife.backend.pipelined import P, PipelinedStep, R, compiles
from pfeife.backend.settings.declared import mark_declared
from pfeife.backend.settings.option_table import Capture
from pfeife.backend.settings.options import Options, options_from
from pfeife.backend.state.values import with_values
from pfeife.backend.step_modules import numbers_in, reached_by
from pfeife.backend.steps import Steps
from pfeife.frontend.batch import Cutter, function_of
from pfeife.frontend.captured import Door, neither, taken
from pfeife.frontend.checks.capture_view import CaptureView
from pfeife.frontend.dynamo import plain_error
from pfeife.runtime.distributed.batches.rank_zero import CallOfRankZero, Sent
from pfeife.runtime.distributed.parallelised import with_cuts
from pfeife.runtime.distributed.process_group import join_world, world_so_far
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.distributed.wrapped import check_alone
from pfeife.runtime.failure import CollectiveError, PipelineError

log = logging.getLogger("pfeife")
Onwards = Callable[[Steps, Sequence[Any], Options, Sent | None], list[torch.Tensor]]


@compiles(Options)
def compile(step: Callable[P, R], **options: Any) -> PipelinedStep[P, R]:
    """A step that runs as a pipeline: torch.compile with this backend, for a loop as it is.

    Every tensor that is cut has as many rows as the others, or a multiple where `in_dims` is given.
    The step is captured as one graph on the first microbatch of a call; a call compiles again when
    shapes, numbers or modes have changed.

    The result's `backend` attribute has its `Options` and what was compiled. Raises ValueError for
    wrong options, and at a call for what cannot be cut or captured. The options, whose meanings
    stand at the end, are in docs/options.md by topics.

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
    # Before a model is changed; what cut it says how many members there are.
    options_from({name: value for name, value in options.items() if name != "parallel"})
    compiler = backend(**with_cuts(options, reached_by(step)))
    return PipelinedStep(step, CompiledStep(step, compiler.options.in_dims, compiler), compiler)


class CompiledStep:
    """A step and what has been compiled of it. One call at a time: other threads wait.

        args ── cut ──> Invocation ── a door captures ──> Steps ── build ──> Compiled
                                                                                │ run
        result <── the step's own Python <── join <── results of microbatches <─┘

    `run` takes what a door has captured to its results: builds it, unless that is known, and runs
    it; `runs` says whether it does. `seen` is called with each graph of Dynamo's.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        in_dims: Any,
        backend: Backend,
        run: Onwards = lambda steps, values, options, sent: steps(values, options, sent),
        runs: bool = True,
        seen: Callable[[], None] = lambda: None,
    ):
        self.step, self.backend, self.onwards, self.runs = step, backend, run, runs
        options = backend.options
        self.cutter = Cutter(
            step, in_dims, options.microbatches, options.replicas, options.fit_smaller_batches
        )
        self.name = self.cutter.name
        # State of one process lives on several devices; a capture sees all of it on one.
        homes = residence().home if options.devices else None
        self.view = CaptureView(options.param_dtype, homes, options.devices or ())
        self.current: ContextVar[Invocation] = ContextVar(self.name)
        # The caller's passes may look at shapes.
        dynamic = False if options.dynamic is None and options.passes else options.dynamic
        shared = self.view, self.cutter.said, dynamic, self._run, self.current
        doorway = Doorway(step, self.name, backend, *shared)
        self.by_dynamo, self.by_trace = DynamoDoor(doorway, seen), TraceDoor(doorway)
        self.door: Capture = options.capture
        self.refused: Exception | None = None  # what Dynamo has said of a step that is traced
        self.log_door = functools.cache(self._log_door)  # once for each door
        self.has_values = False  # whether a call has run: no state waits for its values
        self.of_rank_zero = CallOfRankZero(self.name)
        self.lock = threading.RLock()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # One at a time, since the doors, what is built and the clock are of the step and not of a
        # call.
        with self.lock:
            # The first call under torchrun makes the connections, so it has to know the device.
            world = join_world(device_of(self.step, args, kwargs), self.backend.options.timeout)
            busy = world.building("a call of a compiled step") if world else None
            with busy or contextlib.nullcontext():
                outcome = self.attempt(args, kwargs, world)
        # Outside of the lock, and of what tells other ranks that this one is at a call.
        if outcome.error is not None:
            raise outcome.error
        self.backend.meter.tell()
        return outcome.result

    def attempt(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], world: World | None
    ) -> "Outcome":
        """The result of a call, or an error that all ranks know of. Raises all other errors.

        what fails                   one process         under torchrun
        cutting the batch, a door    is the outcome      all ranks agree on it: the outcome
        an agreement of ranks                            all know of it: the outcome
        the pipeline, when it runs   is raised           is raised, and ends the world
        """
        try:
            invocation = self._cut(args, kwargs, world)
        except CollectiveError as error:
            return Outcome(None, error)
        except PipelineError:
            raise
        except Exception as error:
            return Outcome(None, self._refusal(error, args, kwargs, world))
        token = self.current.set(invocation)
        try:
            return Outcome(self._result_with_values(invocation, world))
        except CollectiveError as error:
            # Other ranks may not have seen the change of sizes for which Dynamo has compiled here.
            if invocation.handed and self.by_dynamo.compilation.dynamic is None:
                self.by_dynamo.forget(None)
            return Outcome(None, error, invocation.at)
        except PipelineError:
            raise
        except Exception as error:
            if invocation.reached:
                raise
            return Outcome(None, self._refusal(error, args, kwargs, world), invocation.at)
        finally:
            self.current.reset(token)

    def _refusal(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], world: World | None
    ) -> Exception:
        """What to say of an error before anything has run, once all ranks know that there is one
        (collective). Arguments that the step does not take explain any other error."""
        # Where rank 0 alone has the batch, others call the step with nothing.
        own = world is None or world.rank == 0 or self.backend.options.batch != "rank0"
        refusal = (self.cutter.mismatch(args, kwargs) if own else None) or plain_error(error)
        if world:  # the others are told, and raise it too
            refusal = wrong_norms(reached_by(self.step), world.size) or refusal
            with contextlib.suppress(CollectiveError):
                world.agreed("", "this call", refused=refusal)
        refusal.__cause__ = error if refusal is not error else error.__cause__
        return refusal

    def _cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], world: World | None
    ) -> Invocation:
        """The call with its batch cut into microbatches."""
        options, sent = self.backend.options_for(world), None
        if world and options.batch == "rank0":
            args, kwargs, sent = self.of_rank_zero(world, args, kwargs)
        call = self.cutter(args, kwargs, options.apart)
        # Before a door looks at the tensors: sizes that will change have to be open in the first
        # capture.
        mark_declared(call.leaves, options.max_sizes, options.sizes_hint)
        where = _first_device(leaf.first for leaf in call.leaves)
        self.view.look(self.step, call.others, where)
        return Invocation(call, sent)

    def _result_with_values(self, invocation: Invocation, world: World | None) -> Any:
        """The result; at the first call with values of models that were made without."""
        # A model from `deferred_init` has none until its stages are known: then each rank makes
        # what it needs. Later calls need not look for such state.
        if self.has_values:
            return self._result(invocation)
        others = invocation.call.others
        if world:
            check_alone([*reached_by(self.step), *others.values()])
        at_once = self.runs and world is None
        with with_values(self.step, others, at_once) as invocation.waits:
            result = self._result(invocation)
        self.has_values = True
        return result

    def _result(self, invocation: Invocation) -> Any:
        """What the step returns, through the door that takes it, with the caller's own tensors in
        place of their first microbatches. Raises ValueError for numbers that Python has computed of
        one microbatch."""
        result, call = self._through_door(invocation), invocation.call
        # A tensor is joined over microbatches; a number was computed by Python, of the first one.
        numbers = list(numbers_in(result)) if call.microbatches > 1 else []
        if numbers:
            raise ValueError(
                f"the step returns the number {numbers[0]!r}, which Python has computed of one "
                "microbatch; return tensors only"
            )
        # The caller's own tensors are whole again before anybody looks at the result.
        call.widen()
        return pytree.tree_map(call.whole, result)

    def _through_door(self, invocation: Invocation) -> Any:
        """What the step returns of a microbatch, with the results of all in it. A step that Dynamo
        has refused is traced from then on, if it can be."""
        if self.door != "trace":
            try:
                result = self.by_dynamo(invocation)
                self.log_door("dynamo")
                return result
            except (CollectiveError, PipelineError, NotReached):
                raise
            except Exception as error:
                # What has been reached was captured: such an error is the pipeline's, or the step's
                # own, and no reason to take the other door.
                if invocation.reached or self.door == "dynamo":
                    raise
                self.refused = plain_error(error)
        try:
            result = self.by_trace(invocation)
        except Exception as error:
            if invocation.reached or self.door == "trace" or self.refused is None:
                raise
            raise neither(self.refused, error, invocation.call.cut) from error
        # From now on: Dynamo would refuse it again, after seconds.
        self.door = "trace"
        self.log_door("trace")
        return result

    def _log_door(self, door: Door) -> None:
        """Says how the step is captured, and why."""
        world = world_so_far()
        level = logging.DEBUG if world and world.rank else logging.INFO
        log.log(level, "%s", taken(self.name, door, self.refused))

    def _run(
        self, invocation: Invocation, steps: Steps, values: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Builds, runs and joins what a door has captured, with the whole batch."""
        # From here on an error means something else, see `attempt`.
        invocation.reached = True
        # What runs reads the caller's own state, not what a capture was shown.
        self.view.put_back()
        world = world_so_far()
        apart = self.backend.options_for(world).apart
        options = self.backend.options_for(world, invocation.call.microbatches * apart)
        if invocation.waits or self.view.is_apart:  # there are no values to check with
            options = attrs.evolve(options, check=False)
        return self.onwards(steps, values, options, invocation.sent)


@attrs.frozen
class Outcome:
    """What has become of a call: its result, or an error and where it was refused, cutting the
    batch or at a door."""

    result: Any
    error: Exception | None = None
    at: Door | Literal["batch"] = "batch"


def device_of(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.device:
    """Where a step's parameters are, as far as can be told before it is captured; else where the
    first tensor among the arguments is."""
    parameters = (parameter for module in reached_by(step) for parameter in module.parameters())
    return _first_device(parameters, pytree.tree_leaves((args, kwargs)))


def _first_device(*values: Iterable[Any]) -> torch.device:
    """Where the first tensor is."""
    tensors = (value for value in chain(*values) if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
