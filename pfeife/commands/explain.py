"""`pfeife explain`: what would become of a step, without training it."""

import argparse

from pfeife.commands.arguments import count, step_arguments

HELP = "say how a step is captured, what of it is pipelined, and what is in the way"
EXAMPLES = """\
example:
  pfeife explain train.py:example --microbatches 4 --stages 2"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife explain`."""
    step_arguments(parser)
    parser.add_argument("--microbatches", type=count, default=2)
    parser.add_argument("--stages", type=count, default=2)
    parser.add_argument("--schedule", default="1f1b")


def run(options: argparse.Namespace) -> str:
    """The text of `pfeife.explain`, for real tensors: it runs forwards for its checks."""
    from pfeife.backend.explain import explain
    from pfeife.commands.models import asked
    from pfeife.commands.programs import wanted_of

    # Real tensors: on the meta device no check could run the step beside its capture.
    request = asked(wanted_of(options), real=True)
    compile_options = {
        "microbatches": options.microbatches,
        "stages": options.stages,
        "schedule": options.schedule,
    }
    return str(explain(request.step, *request.args, options=compile_options, **request.kwargs))
