"""Draws the pictures of these pages: python docs/pictures.py, which writes docs/pictures/*.

All families of schedules, a step as it is planned and a program at three stops as *.svg; and with
Chromium the page of `pfeife demo` as demo.png, whose measured seconds are those of this machine.
"""

import base64
import io
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import pfeife
from pfeife import report, sched
from pfeife.__main__ import main as command_line
from pfeife.report.extra import matplotlib
from pfeife.report.spans import What

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import browser

FOLDER = Path(__file__).parent / "pictures"
RANKS, MICROBATCHES = 4, 8
TWO_STAGES = ("interleaved", "breadth-first", "loops")  # a rank; those on a V have them anyway
SIDES = {"F": What.FORWARD.colour, "B": What.BACKWARD.colour}
Places = Mapping[str, tuple[float, float]]


# What the picture of a page leaves out, to be as large as a screen.
LEFT_OUT = """
    for (const one of document.querySelectorAll("#s-stages, #s-passes")) one.remove();
    for (const one of document.querySelectorAll("#s-timeline details")) one.remove();
    document.body.style.padding = "1.5rem";
    const { width, height } = document.body.getBoundingClientRect();
    return { x: 0, y: 0, width, height, scale: 1 };"""


def main() -> None:
    """Those of the families, of the index page, and one of a page."""
    FOLDER.mkdir(exist_ok=True)
    families()
    save(planned(), FOLDER / "planned.svg")
    save(stops(), FOLDER / "stops.svg")
    page()


def page() -> None:
    """The upper part of what `pfeife demo` writes, as a screen shows it."""
    if browser.missing():
        sys.exit(f"no demo.png: {browser.missing()}")
    with tempfile.TemporaryDirectory() as folder, browser.chromium(1000, 900) as driver:
        path = Path(folder) / "demo.html"
        command_line(["demo", "--html", str(path)])
        browser.opened(driver, path)
        options = {"clip": driver.execute_script(LEFT_OUT), "captureBeyondViewport": True}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", options)
    drawn = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    drawn.quantize(method=Image.Quantize.MAXCOVERAGE).save(FOLDER / "demo.png", optimize=True)


def families() -> None:
    """One picture each, on four ranks."""
    for name, family in sched.POLICIES.items():
        chosen = family.bind(loop_batch=RANKS, prefetch=1) if name == "loops" else family
        on_a_v = family.placement is sched.families.folded
        stages = RANKS * (2 if on_a_v or name in TWO_STAGES else 1)
        ranks = family.placement(stages, RANKS)
        schedule = chosen(stages, MICROBATCHES, ranks)
        report.picture(schedule, FOLDER / f"{name}.svg", title=str(chosen))


class Block(nn.Module):
    """A feed-forward net around a skip."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def planned() -> Any:
    """A step on two nodes of two H100s as it is expected: its timeline, below it the bytes of each
    rank."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(4096) for _ in range(12))).bfloat16()
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    links = pfeife.Network.of(nodes=2, ranks_per_node=2, inside="nvlink4", between="ib-ndr")
    run = pfeife.forecast(
        lambda x: model(x).float().square().mean(),
        x,
        machine="h100-sxm",
        ranks=RANKS,
        microbatches=MICROBATCHES,
        network=links,
        optimizer=torch.optim.AdamW,
    ).run
    figure = report.picture(run.timeline, title="four H100s on two nodes")
    (above,) = figure.axes
    figure.set_size_inches(9, 4)
    above.set_position((0.1, 0.56, 0.88, 0.36))
    above.set_xlabel("")
    above.tick_params(labelbottom=False)
    below = figure.add_axes((0.1, 0.1, 0.88, 0.38), sharex=above)
    for curve in run.memory:
        seconds, held = zip(*run.moments(curve), strict=True)
        gigabytes = [one / 1e9 for one in held]
        below.step(seconds, gigabytes, where="post", lw=1.2, label=f"rank {curve.rank}")
    below.set_ylim(bottom=0)
    below.set_xlabel("seconds")
    below.set_ylabel("GB of a rank")
    below.spines[["top", "right"]].set_visible(False)
    below.legend(frameon=False, ncols=RANKS, loc="lower right", fontsize=8)
    return figure


class Skip(nn.Module):
    """Four layers, and a skip over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x).relu()
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return (x + first).square().mean()


def stops() -> Any:
    """One step as operations, as clusters, and as stages on two ranks: forwards above, backwards
    below, each under the forward that it differentiates."""
    flat = pfeife.capture(Skip(), torch.ones(2, 8))
    clusters = pfeife.fuse()(flat)
    stage_of = tuple(2 * unit // clusters.units for unit in range(clusters.units))
    plan = pfeife.Plan(stage_of, sched.families.one_f_one_b(2, MICROBATCHES))
    ranks = pfeife.apply(plan)(clusters)
    inside: dict[str, tuple[float, float]] = {}
    for call in clusters.calls:
        nodes = [node.name for node in clusters.body(call).graph.nodes if node.op[:4] == "call"]
        for at, name in enumerate(nodes):  # three in a row
            x = (at % 3 - 1) * (0.27 if str(call.kind) == "F" else -0.27)
            y = (0.4 if str(call.kind) == "F" else -1.0) - 0.3 * (at // 3)
            inside[name] = (call.unit + x, y)
    plt = matplotlib()
    figure = plt.figure.Figure((10, 2.7))
    panels = figure.subplots(1, 3, width_ratios=(4, 4, 3))
    titles = (f"{len(inside)} operations", f"{len(clusters.calls)} clusters", "2 ranks")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.axis("off")
    dots(panels[0], flat, inside)
    boxes(plt, panels[1], clusters, apart=1.0)
    boxes(plt, panels[2], ranks, apart=2.0)
    return figure


def dots(axes: Any, flat: pfeife.Program, places: Places) -> None:
    """The operations of a flat program, and what flows between them."""
    lines(axes, flat.graph().edges(data=True), places, gap=3)
    for x, y in places.values():
        axes.plot(x, y, "o", ms=5, mec="#333333", mew=0.5, color=SIDES["F" if y >= 0 else "B"])


def boxes(plt: Any, axes: Any, program: pfeife.Program, apart: float) -> None:
    """The calls of a program, and what flows between them; dashed is sent to another rank."""
    graph = program.graph()
    places = {
        name: (apart * one["unit"], 0.4 if one["kind"] == "F" else -1.3)
        for name, one in graph.nodes(data=True)
    }
    lines(axes, graph.edges(data=True), places, gap=16)
    for name, one in graph.nodes(data=True):
        (x, y), text = places[name], f"{one['kind']}{one['unit']}"
        corner, size = (x - 0.3, y - 0.25), (0.6, 0.5)
        look = {"facecolor": SIDES[one["kind"]], "edgecolor": "#333333", "lw": 0.5, "zorder": 2}
        axes.add_patch(plt.patches.Rectangle(corner, *size, **look))
        axes.text(x, y, text, ha="center", va="center", fontsize=9)
        if one["kind"] == "F" and one.get("rank") is not None:
            axes.text(x, 0.85, f"rank {one['rank']}", ha="center", fontsize=8)
    axes.set_ylim(-1.8, 1.1)
    axes.set_xlim(-0.5 * apart, max(x for x, _ in places.values()) + 0.5 * apart)


def lines(axes: Any, edges: Iterable[tuple[str, str, dict]], places: Places, gap: float) -> None:
    """Arrows from who makes a value to who reads it, which end some points before them."""
    for source, target, one in edges:
        if source in places and target in places:
            (x, _), (to, _) = places[source], places[target]
            bent = "arc3,rad=-0.25" if abs(to - x) > 1.5 and not one["sent"] else "arc3"
            look = {"arrowstyle": "-|>", "color": "#888888", "lw": 0.7, "connectionstyle": bent}
            look |= {"shrinkA": gap, "shrinkB": gap, "mutation_scale": 7}
            look |= {"linestyle": "--", "color": What.RECEIVE.colour} if one["sent"] else {}
            axes.annotate("", places[target], places[source], arrowprops=look, zorder=1)


def save(figure: Any, path: Path) -> None:
    """Writes texts as texts, and the same file for the same figure."""
    same = {"svg.fonttype": "none", "svg.hashsalt": "pfeife", "font.sans-serif": ["DejaVu Sans"]}
    with matplotlib().rc_context(same):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
