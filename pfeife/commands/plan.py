"""`pfeife plan`: a plan for machines that need not be there, and all its figures."""

import argparse
from typing import TYPE_CHECKING, Any

import attrs

from pfeife.commands.answers import deliver, terminal, writable, write
from pfeife.commands.arguments import PRECISIONS, number_or_text, plan_arguments, step_arguments

if TYPE_CHECKING:
    from pfeife.commands.programs import Captures
    from pfeife.forecasting import Outlook, Question

HELP = "plan a training step for machines, and say what it will take"
EXAMPLES = """\
examples:
  a language model by its configuration, on two nodes of eight H100s
    pfeife plan transformers:LlamaConfig --set hidden_size=4096 --set num_hidden_layers=32 \\
      --machine h100-sxm --ranks 16 --nodes 2 --inside nvlink4 --between ib-ndr \\
      --microbatches 32 --batch 32 --sequence 8192 --precision bf16 --optimizer AdamW
  the model of a config.json that you have
    pfeife plan path/config.json --ranks 8 --microbatches 16 --batch 16
  your own step: a function that returns the step and a batch, `return step, batch`
    pfeife plan train.py:example --ranks 4 --microbatches 8 --machine rtx-4090
  write the plan, and train with it: pfeife.compile(step, plan="plan.json", ...)
    pfeife plan train.py:example --ranks 4 --microbatches 8 --out plan.json

Nothing is run and nothing allocated: seconds and bytes are estimates. The capture is kept: a
second question about the same microbatch needs none."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife plan`."""
    step_arguments(parser)
    plan_arguments(parser)
    out = parser.add_argument_group("the answer")
    out.add_argument("--out", metavar="FILE", help="write the plan as JSON, for pfeife.compile")
    out.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is the output")
    out.add_argument("--csv", metavar="FILE", help="write a row a stage as CSV; - is the output")
    out.add_argument(
        "--html", metavar="FILE", help="write a page with all of it (needs pfeife[report])"
    )
    out.add_argument("--trace", metavar="FILE", help="write the timeline for ui.perfetto.dev")
    out.add_argument("--save-program", metavar="FILE", help="write the captured program as JSON")


def run(options: argparse.Namespace) -> str:
    """The plan as tables; files as they were asked for."""
    writable(
        options.out, options.json, options.csv, options.html, options.trace, options.save_program
    )
    # Imported only now: these import torch, and a wrong path is to be said without waiting for it.
    from pfeife import report
    from pfeife.commands import programs
    from pfeife.data import plain

    options, captures = programs.opened(options)
    question = question_of(options)  # what is wrong is said before a capture that takes a minute
    captured = captures.of(options)
    words = programs.words_of(options, captured.program)
    if options.save_program:
        programs.save(captured.program, options.save_program, words)
    outlook = answered(captures, options, question)
    # All that is written says what was asked for, so that a file can be told from another.
    forecast = attrs.evolve(outlook.forecast, asked=words)
    outlook = attrs.evolve(outlook, forecast=forecast)
    if options.out:
        plain.save(outlook.plan, options.out)
    if options.trace:
        write(options.trace, report.chrome_trace(outlook.run))
    if options.html:
        write(options.html, page(outlook, options.what))
    notes = [captured.note] if captured.note else []
    if options.optimizer is None:
        notes.append("memory is without an optimizer's state; --optimizer AdamW counts it")
    notes += _in_float32(outlook, options.precision)
    table = report.forecast_table(forecast, terminal())
    return deliver(
        options,
        data=plain.to_json(forecast),
        rows=report.forecast_csv(forecast),
        text="\n".join([table, *(f"note    {note}" for note in notes)]),
        save=lambda path: plain.save(forecast, path),
    )


def _in_float32(outlook: "Outlook", precision: str) -> list[str]:
    """A note where much is computed in float32 although less was asked for: what is captured is
    what a CPU does."""
    from pfeife.ir.flops import flops_of

    flops = flops_of(outlook.clusters)
    wide = sum(number for dtype, number in flops.items() if str(dtype).endswith("float32"))
    share = wide / (sum(flops.values()) or 1)
    if not precision.startswith(("bf16", "fp16")) or share < 0.02:
        return []
    return [
        f"{share:.0%} of the operations are in float32, though {precision} was asked for: so a "
        "CPU computes attention with dropout. A GPU has a faster way, which is planned where the "
        "configuration has no dropout in attention (GPT-2: --set attn_pdrop=0)"
    ]


def question_of(options: argparse.Namespace) -> "Question":
    """What options ask for. Raises ValueError for what there is not."""
    from pfeife.forecasting import Question

    return Question(
        machine=options.machine,
        ranks=options.ranks,
        network=network_of(options, options.ranks),
        microbatches=options.microbatches,
        replicas=options.replicas,
        members=options.members,
        parallel=options.parallel,
        attention=options.attention,
        schedule=_schedule(options.schedule),
        stages=options.stages,
        memory_limit=options.memory,
        recompute=number_or_text(options.recompute),
        optimizer=number_or_text(options.optimizer),
        data_parallel=options.data_parallel,
        cut_at=options.cut_at,
        search_seconds=options.search_seconds,
        master=PRECISIONS[options.precision][1],
    )


def network_of(options: argparse.Namespace, ranks: int) -> Any:
    """The links that options describe, None for the machine's own."""
    from pfeife.data import plain
    from pfeife.data.network import Network

    if options.network:
        if options.inside or options.between or options.ranks_per_node or options.nodes != 1:
            raise ValueError("--network has the links already: leave out nodes and their links")
        try:
            return plain.load(Network, options.network)
        except OSError as error:
            raise ValueError(
                f"--network {options.network}: {error.strerror}; `pfeife bench-network --out` "
                "writes one, under torchrun"
            ) from None
    ranks_per_node = options.ranks_per_node
    if options.nodes != 1 and ranks_per_node:
        raise ValueError("--nodes and --ranks-per-node say the same: leave one of them out")
    if options.nodes == 1 and not ranks_per_node:
        if options.between:
            raise ValueError(
                f"--between {options.between}: there is one node; say --nodes, or --ranks-per-node"
            )
        if not options.inside:
            return None
    if ranks % options.nodes:
        raise ValueError(f"--ranks {ranks} and --nodes {options.nodes}: nodes are of equal size")
    if not options.inside:
        raise ValueError(
            "several nodes: say what joins the ranks of a node with --inside, such as nvlink4, and "
            "the nodes with --between, such as ib-ndr (`pfeife machines` lists them)"
        )
    # The links between pipelines of several replicas are these too: ranks are those of all.
    each = min(ranks_per_node or ranks // options.nodes, ranks)
    return Network.of(
        nodes=-(-ranks // each),
        ranks_per_node=each,
        inside=options.inside,
        between=options.between,
    )


def page(outlook: "Outlook", title: str) -> str:
    """All of it as a page of HTML."""
    from pfeife import report

    forecast = outlook.forecast
    lines = report.forecast_summary(forecast).splitlines()
    # What the page draws or has as a figure is left out of its notes.
    shown = ("plan", "network", "cuts", "step", "MFU", "advice")
    words = (line.split(maxsplit=1) for line in lines)
    notes = (f"{word[:1].upper() + word[1:]}: {text}" for word, text in words if word in shown)
    about = report.About(
        title, forecast.machine, forecast.memory_limit, tuple(notes), asked=forecast.asked
    )
    return report.html(outlook.history(), outlook.plan, outlook.run, about=about)


def _schedule(name: str) -> Any:
    """A schedule of a CSV, or the name of a family."""
    if not name.endswith(".csv"):
        return name
    from pfeife.commands.file_kinds import schedule_of

    return schedule_of(name)


def answered(captures: "Captures", options: argparse.Namespace, question: "Question") -> "Outlook":
    """The outlook of a program, with a bar while it is planned."""
    import logging

    from pfeife.data.progress import shown

    captures.of(options)  # which shows itself
    with shown(logging.getLogger("pfeife")).phase("planning") as phase:
        return captures.outlook(options, question, phase.progress)
