"""`pfeife simulate`: a schedule without a model, in simulated time."""

import argparse
from typing import Any

from pfeife.commands.arguments import count, seconds

HELP = "run a plan or a schedule in simulated time, and draw it"
EXAMPLES = """\
examples:
  a schedule that torch.distributed.pipelining has written, with a backward of two forwards
    pfeife simulate schedule.csv
  one of the families
    pfeife simulate zb-h1 --stages 4 --microbatches 8
  with seconds of your own, and of a message
    pfeife simulate plan.json --forward 0.010 --backward 0.021 --message 0.001"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife simulate`."""
    parser.add_argument("what", metavar="SCHEDULE", help="plan.json, a CSV, or a family's name")
    parser.add_argument("--stages", type=count, help="of a family")
    parser.add_argument("--ranks", type=count, help="of a family; as many as stages unless given")
    parser.add_argument("--microbatches", type=count, help="of a family")
    parser.add_argument("--forward", type=seconds, help="seconds of one; 1 unless given")
    parser.add_argument("--backward", type=seconds, help="seconds of one; two forwards")
    parser.add_argument("--message", type=seconds, default=0.0, help="seconds; none unless given")
    parser.add_argument("--width", type=count, default=100, help="columns of the drawing")
    parser.add_argument("--csv", metavar="FILE", help="write the schedule as torch's CSV")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for ui.perfetto.dev")


def run(options: argparse.Namespace) -> str:
    """The drawing of a timeline, and what it comes to."""
    from pfeife import report
    from pfeife.commands.answers import writable, write
    from pfeife.lowering.critical import critical_path
    from pfeife.lowering.lower import chain, insert_actions
    from pfeife.lowering.simulate import simulate
    from pfeife.lowering.verify import verify_schedule

    writable(options.csv, options.trace)
    schedule, stage_seconds = _schedule(options)
    # Twice: a schedule must compute all and nothing twice before transfers are put in, and must not
    # deadlock with them.
    lowered = verify_schedule(insert_actions(verify_schedule(schedule), chain(schedule)))
    timeline = simulate(lowered, _seconds(options, stage_seconds))
    waits = report.waits_of(critical_path(timeline), schedule.stage_ranks)
    if options.csv:
        write(options.csv, schedule.to_csv())
    if options.trace:
        write(options.trace, report.chrome_trace(timeline))
    ranks = len(schedule.ranks)
    lines = [
        report.timeline_chart(timeline, options.width),
        f"{schedule.stages} stages on {ranks} ranks, {schedule.microbatches} microbatches: a step "
        f"of {timeline.seconds:.4g} s, {timeline.bubble:.1%} of the ranks' time is bubble",
        "limit: "
        + "; ".join(f"{wait.what} for {wait.share:.0%} of the step" for wait in waits[:3]),
    ]
    return "\n".join(lines)


def _schedule(options: argparse.Namespace) -> tuple[Any, tuple[float, ...] | None]:
    """The schedule, and the seconds of its stages where a plan has them."""
    from pfeife.commands.file_kinds import read
    from pfeife.data.plan import Plan
    from pfeife.data.schedule import Schedule
    from pfeife.sched.families.policies import POLICIES, policy

    # A family needs numbers; a plan or a schedule has them.
    if options.what in POLICIES:
        if not options.stages or not options.microbatches:
            raise ValueError(f"{options.what}: say how many --stages and --microbatches")
        family = policy(options.what)
        placed = family.placement(options.stages, options.ranks or options.stages)
        return family(options.stages, options.microbatches, placed), None
    if not options.what.endswith((".json", ".csv")):
        raise ValueError(f"{options.what!r} is no file and none of the families {sorted(POLICIES)}")
    content = read(options.what)
    if isinstance(content, Plan):
        return content.schedule.computing(), content.stage_seconds
    if isinstance(content, Schedule):
        return content.computing(), None
    raise ValueError(
        f"{options.what}: neither a plan nor a schedule; `pfeife show` says what it is"
    )


def _seconds(options: argparse.Namespace, stage_seconds: tuple[float, ...] | None) -> Any:
    """What actions take: as options say, or as a plan has it for a forward and its backward."""
    from pfeife.data.schedule import SENDS, Action, Do

    def both(stage: int) -> tuple[float, float]:
        if (
            stage_seconds
            and options.forward is None
            and options.backward is None
            and stage < len(stage_seconds)
        ):
            # A plan has the sum of both: a backward takes two forwards, as it does without a plan.
            return stage_seconds[stage] / 3, stage_seconds[stage] * 2 / 3
        forward = options.forward or (options.backward / 2 if options.backward else 1.0)
        return forward, options.backward or 2 * forward

    def seconds_of(action: Action) -> float:
        if action.do in SENDS:
            return options.message
        if action.do == Do.FORWARD:
            return both(action.stage)[0]
        if action.do == Do.BACKWARD:
            return both(action.stage)[1]
        # Half a backward for either of its parts; a receive only waits.
        return both(action.stage)[1] / 2 if action.do.kind else 0.0

    return seconds_of
