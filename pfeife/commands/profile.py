"""`pfeife profile`: a step that is run, its measured times beside the predicted ones."""

import argparse

from pfeife.commands.arguments import count, step_arguments

HELP = "run a step in this process, and show measured times beside predicted ones"
EXAMPLES = """\
The step runs for real on the CPU: each rank is a thread. Its clusters are measured first, and what
is predicted is for these figures. Nothing is trained.

example:
  pfeife profile train.py:example --microbatches 4 --stages 2"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife profile`."""
    step_arguments(parser)
    parser.add_argument("--microbatches", type=count, default=4)
    parser.add_argument("--stages", type=count, default=2)
    parser.add_argument("--schedule", metavar="NAME", default="1f1b")
    parser.add_argument(
        "--costs", choices=("measure", "estimate"), default="measure", help="of what is predicted"
    )
    parser.add_argument("--html", metavar="FILE", help="write it as a page (needs pfeife[report])")
    parser.add_argument("--width", type=count, default=80, help="columns of drawings")


def run(options: argparse.Namespace) -> str:
    """A row for every kind of action, and both timelines."""
    from pfeife import report
    from pfeife.backend.shared.reporting import measured, page_of
    from pfeife.backend.step import compile as compiled_step
    from pfeife.commands.answers import writable, write
    from pfeife.commands.models import asked
    from pfeife.commands.programs import wanted_of

    writable(options.html)
    request = asked(wanted_of(options), real=True)
    step = compiled_step(
        request.step,
        microbatches=options.microbatches,
        stages=options.stages,
        schedule=options.schedule,
        costs=options.costs,
    )
    measurement = measured(step.backend, lambda a, k: step(*a, **k), request.args, request.kwargs)
    # Predicted is what was compiled and run, not what a plan for other shapes would be.
    target = measurement.compiled.target
    assert target is not None
    predicted = report.expected(measurement.compiled.program, measurement.compiled.schedule, target)
    if options.html:
        write(
            options.html,
            page_of(measurement.compiled, options.what, measurement.run, options.typed),
        )
    compared = report.compare_times(predicted.timeline, measurement.run.timeline)
    return "\n".join(
        [
            report.comparison_table(compared),
            f"\npredicted: {predicted.timeline.seconds:.4g} s, bubble "
            f"{predicted.timeline.bubble:.1%}",
            report.timeline_chart(predicted.timeline, options.width),
            f"\nmeasured: {measurement.run.timeline.seconds:.4g} s, bubble "
            f"{measurement.run.timeline.bubble:.1%}",
            report.timeline_chart(measurement.run.timeline, options.width),
        ]
    )
