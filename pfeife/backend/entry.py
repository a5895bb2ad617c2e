"""torch.compile's entry: from Dynamo's graph to a pipelined step that autograd can use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from pfeife import _torch
from pfeife.backend.graph_break_steps import PieceSteps
from pfeife.backend.graphs.batched_graph import BatchedGraph
from pfeife.backend.graphs.graph_breaks import Piece
from pfeife.backend.settings.options import Options, options_from
from pfeife.backend.settings.options_typed import with_options
from pfeife.backend.shared.context import Context
from pfeife.backend.step_modules import hooks_of
from pfeife.backend.steps import Steps
from pfeife.frontend.arguments import text_of
from pfeife.frontend.dynamo import compiled_too_often
from pfeife.frontend.results import Key
from pfeife.runtime.distributed.process_group import is_one_of_several


class Backend(Context):
    """A compile backend with its options bound."""

    def __init__(self, options: Options):
        super().__init__(options)
        self.losses: dict[Any, Key] = {}  # by frames, for calls without gradients
        self.rows = WeakIdKeyDictionary()  # where the batch is in what these have returned
        self.broken: tuple[str, str] | None = None  # the last break, as `graph_break` has it
        self.graphs: dict[str, Steps] = {}  # by what they compute

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable:
        """Called by Dynamo with a graph of the whole batch; the program is built at the first call
        of the result, for each shape that it is called with.

        What is wrong is raised at that call, since torch may be told to suppress what a backend
        raises, and to go on with eager.
        """
        # Before Dynamo has made its guards of this graph, which is right after this call.
        _torch.guard_tensors()
        try:
            if _torch.is_last_compilation():
                raise compiled_too_often()
            steps = self.steps(module, examples)
        except Exception as error:
            return _raising(error)
        # Dynamo does not guard dicts of hooks: a hook that comes later would silently not run.
        hooks = hooks_of(steps.graph.inputs.modules).values()

        def run(*args: Any) -> Any:
            if any(guard.broken() for guard in hooks):
                raise ValueError(_HOOKS)
            results = steps(args)
            # Only now: what a person does with the figures may raise, or wait, and this call is
            # over.
            self.meter.tell()
            return results

        return run

    def steps(self, module: fx.GraphModule, examples: Sequence[Any]) -> Steps:
        """What is built of a graph, while Dynamo compiles it. Raises ValueError as the graphs do,
        and for an option that comes too late."""
        options = self.options
        if options.batch == "rank0":
            raise ValueError(
                'option batch="rank0": Dynamo calls this backend with the arguments of its own '
                "rank; use pfeife.compile(step, ...), which asks rank 0 for them first"
            )
        for option, usual, what in (("in_dims", 0, "rows"), ("param_dtype", None, "parameters")):
            if getattr(options, option) != usual:
                raise ValueError(
                    f"option {option}={getattr(options, option)}: it is one of pfeife.compile, "
                    "which captures the step by itself; torch.compile has captured it with the "
                    f"{what} as they are"
                )
        # Both are known only while Dynamo compiles, that is now, and not when the result is called.
        name, broken = _torch.frame_name(), _torch.graph_break()
        if not broken:
            steps = Steps(self, BatchedGraph(module, examples, self.losses), name)
            return self.known_steps(steps, module)
        # Between two graphs the step's Python sees the whole batch, which no rank has here.
        if options.batch != "global":
            raise ValueError(
                f"option batch={options.batch!r}: {name} is broken into several graphs, and "
                f"what is computed between them would be of one replica "
                f"({broken[0] or broken[1]}); use pfeife.compile(step, ...), or give every rank "
                "the whole batch"
            )
        for option in ("log_every", "on_step"):
            if getattr(options, option) is not None:
                raise ValueError(
                    f"option {option}: {name} is broken into several graphs, each with figures of "
                    f"its own ({broken[0] or broken[1]}); use pfeife.compile(step, ...)"
                )
        if broken[0] or self.broken is None:
            self.broken = broken[0] or "it goes on after another graph", broken[1]
        pieces = PieceSteps(self, Piece(module, examples, self.rows), name, self.broken)
        return self.known_steps(pieces, module)

    def forget(self) -> None:
        """Drops all that was built, as Dynamo has dropped its graphs."""
        self.compiled.clear()
        self.graphs.clear()

    def known_steps(self, steps: Steps, module: fx.GraphModule) -> Steps:
        """The same steps, or on ranks those of an earlier graph that is the same one: Dynamo
        compiles a step once more where its parameters have left this rank, and on other ranks it
        does not."""
        if not is_one_of_several():
            return steps
        inputs = steps.graph.inputs
        # By text, since Dynamo gives every graph a new module; and by the modules that it reads,
        # since two models of one class have graphs of the same text.
        text = f"{type(steps).__name__} {steps.name} {text_of(module, inputs)}"
        earlier = self.graphs.get(text)
        if earlier is None or set(earlier.graph.inputs.modules) != set(inputs.modules):
            self.graphs[text] = earlier = steps
        return earlier


_HOOKS = (
    "a hook of a module has been added, changed or taken away since torch.compile has captured the "
    "step, whose graph has those of before: call torch._dynamo.reset() and compile the step again, "
    "or use pfeife.compile, which then captures it again"
)


def _raising(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error.with_traceback(None)

    return refuse


@with_options(Options)
def backend(**options: Any) -> Backend:
    """A backend for torch.compile or torch.compiler.set_default_backend.

    Raises ValueError for an unknown option or a wrong value.
    """
    return Backend(options_from(options))


# The backends of torch.compile(..., backend="pfeife"), by what compiles all graphs of one of these.
_named = WeakIdKeyDictionary()


def entry(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """What the name "pfeife" in torch.compile means."""
    if mode not in (None, "default"):
        raise ValueError(f"mode={mode!r}: pfeife has options, no modes")
    who = _torch.who_compiles()
    if who not in _named:
        _named[who] = backend(**(options or {}))
    run: Callable = _named[who](module, examples)
    return run
