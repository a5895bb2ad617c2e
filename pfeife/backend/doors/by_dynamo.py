"""The first door: Dynamo reads the step's code, and hands over its graph.

    call    ->  Dynamo: has it a graph for this?
                  no:   reads the step     ->  graph()  captures it, and gives Dynamo what runs
                  yes                      ->  run()    with the tensors that the graph reads
    result  <-  the step's own Python around them

Dynamo calls both while it is called itself, so the door knows which invocation that is for.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.backend.doors.doorway import Doorway, larger
from pfeife.backend.doors.invocation import Invocation
from pfeife.backend.step_modules import given_by, hooks_of
from pfeife.frontend.arguments import Inputs
from pfeife.frontend.checks.side_effects import check_again, check_settled
from pfeife.frontend.describe import describe
from pfeife.frontend.dynamo import copied, dynamo_forward, dynamo_graph
from pfeife.frontend.forward import Forward
from pfeife.frontend.watch.deterministic import Recorded
from pfeife.frontend.watch.guards import Guard
from pfeife.ir.parts import Role
from pfeife.runtime.failure import CollectiveError, PipelineError

log = logging.getLogger("pfeife")


class NotReached(ValueError):
    """Raised where torch.compile has not asked for anything to be compiled."""


@attrs.frozen(eq=False)
class Compilation:
    """What Dynamo has compiled of a step: `function` is called as the step is. `hooks` are those of
    modules, which Dynamo does not guard. `unsettled` are graphs, and their inputs, whose step sets
    numbers that nobody has compared yet."""

    function: Callable[..., Any]
    dynamic: bool | None
    hooks: dict[int, Guard] = attrs.field(factory=dict)
    unsettled: list[tuple[str, Inputs]] = attrs.field(factory=list)


class DynamoDoor:
    """A step as Dynamo compiles it. `seen` is called with each graph, while that happens."""

    def __init__(self, doorway: Doorway, seen: Callable[[], None]):
        self.doorway, self.seen = doorway, seen
        self.forget(doorway.dynamic)

    def forget(self, dynamic: bool | None) -> None:
        """Dynamo knows nothing of the step from now on, and compiles it so."""
        function = _torch.whole_graph(self.doorway.step, self._graph, dynamic)
        self.compilation = Compilation(function, dynamic)

    def __call__(self, invocation: Invocation) -> Any:
        """What the step returns. Where Dynamo fails with sizes that it has found to change, the
        step has a graph for each of them from now on. Raises NotReached where nothing was
        compiled, and what the step, a capture or a pipeline raises."""
        invocation.at = "dynamo"
        try:
            return self._called(invocation)
        except (CollectiveError, PipelineError, NotReached):
            raise
        except Exception as error:
            # Of a step that has run before, what is new are its sizes. The first call, and what a
            # pipeline raises once it runs, are other matters.
            programs = [compiled.program for compiled in self.doorway.backend.compiled]
            sizes = {tuple(port.shape for port in p.ports(Role.BATCH)) for p in programs}
            is_limit = _torch.is_limit_of_compilations(error)
            is_full = is_limit and len(sizes) > 1
            # One size that is compiled again and again: no graph of it stays right.
            other_sizes = self.compilation.dynamic is None and not is_limit
            if invocation.reached or not (programs and (other_sizes or is_full)):
                raise
            log.debug("%s has a graph for each size, since: %s", self.doorway.name, error)
            if is_full:  # nothing is kept of what was built
                self.doorway.tell_of_drops()
                self.doorway.backend.forget()
            self.forget(dynamic=False)
            return self._called(invocation)

    def _called(self, invocation: Invocation) -> Any:
        call, view = invocation.call, self.doorway.view
        # Dynamo has baked the hooks of modules into its graph, and guards none of them.
        if any(guard.broken() for guard in self.compilation.hooks.values()):
            self.forget(self.compilation.dynamic)
        # Dynamo gives up after 8 programs of one function; how many there may be is said by an
        # option here.
        with _torch.willing(self.doorway.most), view.seen():
            result = self.compilation.function(*call.args, **call.kwargs)
        # Only now: the step has run once, and is run again to see whether its numbers stay.
        while self.compilation.unsettled:
            graph, inputs = self.compilation.unsettled.pop()
            invocation.everything()
            with view.seen():
                check_settled(self.doorway.step, call, given_by(call.leaves), graph, inputs)
        if not invocation.reached:
            raise NotReached(
                f"the call of {self.doorway.name} has not reached Pfeife: it computes nothing with "
                "tensors, or torch.compile is turned off (TORCH_COMPILE_DISABLE, "
                "torch.compiler.set_stance)"
            )
        return result

    def _graph(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Called by Dynamo with the graph of a microbatch."""
        self.seen()
        doorway, invocation = self.doorway, self.doorway.current.get()
        invocation.handed, call = True, invocation.call
        forward = dynamo_forward(module)
        # As a result of a microbatch it would be the size of that, and not of the batch.
        if any(isinstance(value, torch.SymInt) for value in forward.results):
            raise ValueError("the step returns a size of its arguments: say dynamic=False")
        inputs = describe(module, examples, caller_tensors=given_by(call.leaves))
        doorway.view.check(inputs)
        # Numbers that the step sets, which Dynamo takes for settled: unless the attributes that
        # hold them have changed, they are compared with those of the next microbatch.
        changed = {name for _, name, *_ in _torch.changed_attributes()}
        new = inputs.numbers.keys() - inputs.settled
        others = {name for name in new if name.rpartition(".")[2] not in changed}
        if others and call.microbatches > 1:
            self.compilation.unsettled[:] = [(str(module.graph), inputs)]
        self.compilation.hooks.update(hooks_of(inputs.modules))
        frame = _torch.frame()
        captured = doorway.steps(forward, inputs, self._grown, frame, "dynamo", self._doubled)
        steps = doorway.backend.known_steps(captured, module)
        # The step sets attributes: whether that is the same for every microbatch, one more run of
        # it shows.
        unsure = bool(changed or _torch.changed_containers())

        def run(*args: Any) -> list[torch.Tensor]:
            nonlocal unsure
            now = doorway.current.get()
            if unsure and now.call.microbatches > 1:
                self._check_again(now)
            unsure = False
            return doorway.run(now, steps, [now.call.whole(value) for value in args])

        return run

    def _check_again(self, invocation: Invocation) -> None:
        """Raises CollectiveError for attributes that the step sets and that make a difference."""
        invocation.everything()
        self.doorway.view.put_back()
        try:
            with self.doorway.view.seen(values=True):
                check_again(self.doorway.step, invocation.call)
        except ValueError as error:  # of all ranks, which run the same Python
            raise CollectiveError(str(error)) from error

    def _grown(self, times: int) -> tuple[Forward, Inputs]:
        """Dynamo's graph of a microbatch with so many times as many rows, and its inputs."""
        call = larger(self.doorway.current.get(), times)

        def read(module: fx.GraphModule, examples: list[Any]) -> tuple[Forward, Inputs]:
            inputs = describe(module, examples, caller_tensors=given_by(call.leaves))
            return dynamo_forward(copied(module)), inputs

        with self.doorway.view.seen():
            return dynamo_graph(self.doorway.step, call.args, call.kwargs, read)

    def _doubled(self, record: Recorded, written: Collection[str]) -> Sequence[torch.Tensor]:
        """Runs the step on the first microbatch twice over (see `check_counting`). Dynamo reads it
        anew for that, since a graph has the numbers of its own sizes."""
        call = larger(self.doorway.current.get(), 2)

        def run(module: fx.GraphModule, examples: list[Any]) -> Sequence[torch.Tensor]:
            inputs = describe(module, examples, caller_tensors=given_by(call.leaves))
            values = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, list(examples))
            for at, argument in enumerate(inputs.arguments):  # what it writes to is a copy
                if argument.given or {*argument.names} & {*written}:
                    values[at] = pytree.tree_map_only(torch.Tensor, torch.clone, values[at])
            with record:
                return dynamo_forward(module).run(*values)

        with self.doorway.view.seen(values=True):
            return dynamo_graph(self.doorway.step, call.args, call.kwargs, run)
