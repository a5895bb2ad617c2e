"""Draws the pictures of the docs: python docs/pictures.py, which writes docs/pictures/*.

All families of schedules as *.svg; and with Chromium the page of `pfeife demo` as demo.png, whose
measured seconds are those of this machine.
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from pfeife import report, sched
from pfeife.__main__ import main as pfeife

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import browser

FOLDER = Path(__file__).parent / "pictures"
RANKS, MICROBATCHES = 4, 8
TWO_STAGES = ("interleaved", "breadth-first", "loops")  # a rank; those on a V have them anyway
# What the picture of a page leaves out, to be as large as a screen.
LEFT_OUT = """
    for (const one of document.querySelectorAll("#s-stages, #s-passes")) one.remove();
    for (const one of document.querySelectorAll("#s-timeline details")) one.remove();
    document.body.style.padding = "1.5rem";
    const { width, height } = document.body.getBoundingClientRect();
    return { x: 0, y: 0, width, height, scale: 1 };"""


def main() -> None:
    """Those of the families, and one of a page."""
    FOLDER.mkdir(exist_ok=True)
    families()
    page()


def page() -> None:
    """The upper part of what `pfeife demo` writes, as a screen shows it."""
    if browser.missing():
        sys.exit(f"no demo.png: {browser.missing()}")
    with tempfile.TemporaryDirectory() as folder, browser.chromium(1000, 900) as driver:
        path = Path(folder) / "demo.html"
        pfeife(["demo", "--html", str(path)])
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


if __name__ == "__main__":
    main()
