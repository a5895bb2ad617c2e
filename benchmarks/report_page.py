"""The page of 16 ranks and 64 microbatches: its size, what it takes to make, to load and to use.

    python benchmarks/report_page.py [--ranks 16] [--microbatches 64] [--out FILE] [--shots FOLDER]

A net of two blocks a rank, two stages each, zero-bubble; beside the prediction the same with
seconds that vary by a tenth. Times in Chromium, without a window: until all is drawn, to step
through all passes, and to point at 50 spans; each from the script's call to its return.
"""

import argparse
import base64
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine
from pfeife.lowering.predict import action_seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import browser

CORE = machine("cpu-core")
STEP = """
  const passes = [...document.querySelectorAll(".pass")], begun = performance.now();
  for (const _ of passes) {
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
    document.body.offsetHeight;
  }
  return [passes.length, performance.now() - begun];"""
POINT = """
  const plot = document.getElementById("timeline"), { xaxis, yaxis } = plot._fullLayout;
  const box = plot.getBoundingClientRect(), tip = document.getElementById("tip");
  const begun = performance.now();
  let shown = 0;
  for (let i = 0; i < 50; i++) {
    const clientX = box.left + xaxis._offset + (0.2 + 0.012 * i) * xaxis._length;
    const clientY = box.top + yaxis._offset + yaxis.d2p(i % arguments[0] - 0.2);
    plot.dispatchEvent(new MouseEvent("mousemove", { clientX, clientY }));
    shown += !tip.hidden;
  }
  return [shown, performance.now() - begun];"""


class Block(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def page_of(ranks: int, microbatches: int) -> tuple[str, int, float]:
    """The page, how many events it shows, and the seconds that it took to make it."""
    net = nn.Sequential(*(Block() for _ in range(2 * ranks)))
    program = pfeife.capture(lambda x: net(x).square().mean(), torch.randn(8, 64))
    fused = pfeife.compose(pfeife.fuse(), pfeife.split_backward())(program)
    fused = pfeife.annotate(estimate(fused, CORE))(fused)
    tried: list = []
    plan = sched.plan(
        fused,
        machine=CORE,
        microbatches=microbatches,
        ranks=ranks,
        stages=2 * ranks,
        schedule="search",
        search_seconds=5,
        watched=tried.append,
    )
    first = pfeife.record(program, pfeife.fuse(), pfeife.split_backward(), start="capture")
    rest = pfeife.record(fused, *pfeife.passes_of(plan, fused), start="annotate")
    sent = rest[-1].program
    schedule = sched.lower(plan.schedule, sent)
    target = report.Target(CORE, optimizer="adamw", limit=4 * 2**20)
    run = report.expected(sent, schedule, target)
    seconds, draw = action_seconds(sent, CORE), random.Random(0)
    varied = sched.simulate(schedule, lambda action: seconds(action) * draw.uniform(0.9, 1.1))
    about = report.About(f"{ranks} ranks, {microbatches} microbatches", CORE.name, target.limit)
    about = report.About(*(about.title, about.machine, about.limit), tried=tuple(tried))
    begun = time.perf_counter()
    page = report.html((*first, *rest), plan, run, report.Run(varied, run.memory), about)
    return page, 2 * len(run.timeline.events), time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("page.html"))
    parser.add_argument("--shots", type=Path, help="a folder for screenshots")
    given = parser.parse_args()
    page, events, seconds = page_of(given.ranks, given.microbatches)
    given.out.write_text(page)
    print(f"{events} events, {len(page) / 1e6:.2f} MB, made in {seconds:.2f} s")
    if browser.missing():
        print(browser.missing())
        return 1
    with browser.chromium() as driver:
        for turn in ("first", "again"):
            begun = time.perf_counter()
            browser.opened(driver, given.out.absolute())
            print(
                f"loaded and drawn ({turn}): {time.perf_counter() - begun:.2f} s; {_parts(driver)}"
            )
        passes, took = driver.execute_script(STEP)
        print(f"{passes} steps through passes: {took:.0f} ms")
        shown, took = driver.execute_script(POINT, given.ranks)
        print(f"50 moves of the pointer, {shown} at a span: {took:.0f} ms")
        print(f"messages of the console: {len(driver.get_log('browser'))}")
        if given.shots:
            given.shots.mkdir(parents=True, exist_ok=True)
        for width in (600, 1280, 2000) if given.shots else ():
            driver.set_window_size(width, 900)
            time.sleep(1)
            (given.shots / f"page-{width}.png").write_bytes(_picture(driver, width))
    return 0


def _parts(driver: browser.Any) -> str:
    """When plotly was there and each drawing drawn, from the opening of the page on."""
    marks = driver.execute_script(
        "return performance.getEntriesByType('mark').map((one) => [one.name, one.startTime])"
    )
    return ", ".join(f"{name} at {at / 1e3:.2f}" for name, at in marks)


def _picture(driver: browser.Any, width: int) -> bytes:
    height = driver.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    asked = {"captureBeyondViewport": True, "clip": clip}
    return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])


if __name__ == "__main__":
    sys.exit(main())
