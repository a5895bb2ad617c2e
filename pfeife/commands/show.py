"""`pfeife show`: what a file is, and what is in it."""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

HELP = "say what a file or folder is that pfeife or torch has written, and show it"
EXAMPLES = """\
Plans, schedules (JSON and CSV), forecasts, machines, networks, timelines, Chrome traces, costs,
captured programs, and checkpoint folders are known.

example:
  pfeife show plan.json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife show`."""
    parser.add_argument("path", help="a file, or the folder of a checkpoint")
    parser.add_argument("--width", type=int, default=100, help="columns of drawings")


def run(options: argparse.Namespace) -> str:
    """The file in words."""
    from pfeife.commands import file_kinds as artefacts

    if Path(options.path).is_dir():
        return _folder(options.path)
    content = artefacts.read(options.path)
    name = type(content).__name__
    show = {
        "Plan": _plan,
        "Schedule": _schedule,
        "Forecast": _forecast,
        "Machine": _machine,
        "Network": _network,
        "Timeline": _timeline,
        "Costs": _costs,
        "StoredProgram": _program,
    }.get(name)
    if show is not None:
        return show(content, options.width)
    return _other(content, options.path)


def _plan(plan: Any, width: int) -> str:
    from pfeife.report import table

    seconds = plan.stage_seconds or (None,) * plan.stages
    rows = [
        (
            stage,
            plan.stage_ranks[stage],
            plan.stage_of_cluster.count(stage),
            "" if seconds[stage] is None else f"{1e3 * seconds[stage]:.2f} ms",
            len(plan.recompute[stage].names) if plan.recompute else 0,
        )
        for stage in range(plan.stages)
    ]
    head = ("stage", "rank", "clusters", "time", "nodes again")
    step = "" if plan.step_seconds is None else f", a step of {plan.step_seconds:.4g} s expected"
    title = f"a plan for the program {plan.program or 'of nobody knows'}{step}"
    return f"{title}\n{table(rows, head)}\n{_schedule(plan.schedule, width)}"


def _schedule(schedule: Any, width: int) -> str:
    """In simulated time, a backward twice a forward."""
    from pfeife.lowering.lower import chain, insert_actions
    from pfeife.lowering.simulate import simulate
    from pfeife.report import timeline_chart

    # A file may have transfers or none: those of a chain of stages take the place of its own.
    alone = schedule.computing()
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    lowered = insert_actions(alone, chain(alone))
    timeline = simulate(lowered, lambda action: cost.get(action.do.value, 0.0))
    return (
        f"a schedule of {schedule.stages} stages on {len(schedule.ranks)} ranks, "
        f"{schedule.microbatches} microbatches (drawn with backwards of two forwards: "
        f"{timeline.bubble:.1%} bubble)\n{timeline_chart(timeline, width)}"
    )


def _forecast(forecast: Any, width: int) -> str:
    from pfeife.commands.answers import terminal
    from pfeife.report import forecast_table

    return f"a forecast\n{forecast_table(forecast, terminal())}"


def _machine(machine: Any, width: int) -> str:
    from pfeife.report import size

    rates = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in machine.flops.items())
    lines = [
        f"the machine {machine.name}: {size(machine.memory)}, {rates} TFLOP/s sustained, "
        f"{machine.memory_bandwidth / 1e9:g} GB/s of memory, {machine.link_bandwidth / 1e9:g} GB/s "
        f"and {1e6 * machine.link_latency:g} us to another rank",
        *(f"{field}: {source}" for field, source in machine.sources.items()),
    ]
    return "\n".join(lines)


def _network(network: Any, width: int) -> str:
    from pfeife.report import network_table

    return f"a network\n{network_table(network)}"


def _timeline(timeline: Any, width: int) -> str:
    from pfeife.report import timeline_chart

    title = f"a timeline of {timeline.seconds:.4g} s, {timeline.bubble:.1%} bubble"
    return f"{title}\n{timeline_chart(timeline, width)}"


def _costs(costs: Any, width: int) -> str:
    from pfeife.report import table

    rows = [(name, f"{1e3 * seconds:.3f} ms") for name, seconds in costs.seconds.items()]
    return f"costs, {costs.source}\n{table(rows, ('call', 'time'))}"


def _program(stored: Any, width: int) -> str:
    from pfeife.report import table

    # The operations of which there are most say which model it is.
    kinds = Counter(node.target for node in stored.nodes if node.op == "call_function")
    ports = Counter(port.role.value for port in (*stored.inputs, *stored.outputs))
    counts = ", ".join(f"{count} x {role}" for role, count in ports.items())
    head = f"a captured program of {len(stored.nodes)} nodes: {counts}"
    return f"{head}\n{table(kinds.most_common(15), ('operation', 'times'))}"


def _other(data: Any, path: str) -> str:
    """A Chrome trace, or a configuration."""
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if isinstance(events, list):
        spans = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
        kinds = Counter(str(e.get("cat", "")) for e in spans)
        counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(8))
        return (
            f"a Chrome trace of {len(spans)} spans ({counts}); open it in https://ui.perfetto.dev"
        )
    if isinstance(data, dict) and {"architectures", "model_type", "_class_name"} & set(data):
        name = data.get("_class_name") or data.get("architectures") or data.get("model_type")
        return f"the configuration of a model, {name}; `pfeife plan {path} ...` plans it"
    raise ValueError(f"{path}: JSON, but nothing that pfeife knows")


def _folder(path: str) -> str:
    from pfeife.frontend.deferred.checkpoint_folder import Folder
    from pfeife.report import size, table

    folder = Folder(path)
    rows = [
        (
            name,
            "x".join(map(str, tensor.shape)) or "scalar",
            str(tensor.dtype).removeprefix("torch."),
        )
        for name, tensor in sorted(folder.tensors.items())
    ]
    whole = sum(tensor.nbytes for tensor in folder.tensors.values())
    head = f"a checkpoint of {len(rows)} tensors, {size(whole)}, and {len(folder.objects)} objects"
    shown = [*rows[:40], *([(f"and {len(rows) - 40} more", "", "")] if len(rows) > 40 else [])]
    return f"{head}\n{table(shown, ('tensor', 'shape', 'dtype'))}"
