"""The page: what is in it, and that what it is given stays text."""

import json
from html.parser import HTMLParser

import attrs
import browser
import pytest
from programs import CPU_CORE, captured, clusters, lowered

import pfeife
from pfeife import report, sched
from pfeife.data.tried import Tried
from pfeife.passes.compose import Recorded

pytest.importorskip("plotly")
LEFT, RIGHT, ENTER = "\ue012", "\ue014", "\ue007"  # keys, as WebDriver has them


class Read(HTMLParser):
    """What a page is made of."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: dict[str, str] = {}  # of what has an id
        self.said, self.at = "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.at = dict(attributes).get("id") or ("" if tag == "script" else self.at)

    def handle_data(self, data):
        self.texts[self.at] = self.texts.get(self.at, "") + data
        self.said += data

    def ids(self) -> set[str]:
        return {found["id"] for _, found in self.elements if "id" in found}


@pytest.fixture(scope="module")
def made():
    """A program on its way, its plan and what it will take."""
    _, program, _, _ = captured("GPT")
    fused = clusters(program)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=2)
    history = pfeife.record(fused, *pfeife.passes_of(plan, fused), start="annotate")
    ranks = history[-1].program
    target = report.Target(CPU_CORE, optimizer="adamw")
    run = report.expected(ranks, lowered(plan, ranks), target)
    return history, plan, run


def figures(page: Read) -> dict[str, dict]:
    return json.loads(page.texts["figures"])


def test_a_page_has_what_is_known(made):
    """Each drawing has what it is given, plotly knows all of it, and nothing is fetched."""
    history, plan, run = made
    asked = {"command": "pfeife plan gpt.py:example", "precision": "bf16"}
    about = report.About("GPT on two ranks", "cpu-core", 2**20, ("Of the tests.",), asked=asked)
    text = report.html(history, plan, run, run.timeline, about)
    assert text == report.html(history, plan, run, run.timeline, about)
    page = Read(text)
    assert {"s-stages", "s-timeline", "s-memory", "s-passes"} <= page.ids()
    words = ("GPT on two ranks", "pfeife plan gpt.py:example", "bf16", "cpu-core", "Of the tests.")
    places = [page.said.index(word) for word in words]
    assert places == sorted(places) and places[-1] < page.said.index("Stages")
    assert "by its critical path" in page.said
    folded = [found for _, found in page.elements if found.get("class") == "pass"]
    assert len(folded) == len(history) and not any("open" in found for found in folded)
    assert all(f"{at} {one.maker}" in page.said for at, one in enumerate(history))
    found = figures(page)
    assert found.keys() == {"stages", "timeline", "memory"}
    traces = [one for one in found["timeline"]["data"] if "customdata" in one]
    drawn = [span[-1] for one in traces if one["name"] != "wait" for span in one["customdata"]]
    events = [str(event.action) for event in run.timeline.events]
    assert sorted(drawn) == sorted(2 * events)
    from plotly import graph_objects

    for one in found.values():
        graph_objects.Figure(one["data"], one["layout"])  # raises for what plotly does not know
    for _, attributes in page.elements:
        assert not {"src", "href", "onclick", "action"} & {
            name for name, value in attributes.items() if not str(value).startswith("#")
        }
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy


def test_what_is_not_given_is_left_out(made):
    run = made[-1]
    assert not {one for one in Read(report.html()).ids() if one.startswith("s-")}
    alone = Read(report.html((), None, None, run.timeline))
    assert {one for one in alone.ids() if one.startswith("s-")} == {"s-timeline"}


def test_texts_stay_texts(made):
    """Names and lines of a model end no element, and are no elements."""
    history, plan, run = made
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    renamed = tuple(Recorded(evil, one.program) for one in history)
    about = report.About(evil, evil, notes=(evil,), asked={"command": evil, evil: evil})
    page = Read(report.html(renamed, plan, run, about=about))
    plain = Read(report.html(history, plan, run, about=attrs.evolve(about, notes=())))
    kinds = [tag for tag, _ in page.elements]
    assert kinds.count("script") == 3 and "img" not in kinds
    assert page.said.count(evil) > plain.said.count(evil) > 2


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
def test_the_page_in_a_browser(made, tmp_path):
    """Everything is drawn, the console stays empty, pointing says what is there, the clocks zoom
    together, keys step through the passes, and the search finds what is there."""
    history, plan, run = made
    tried = tuple(Tried(0.1 * at, "rule", 2, 1.0 / (at + 1), 1.0 / (at + 1)) for at in range(3))
    about = report.About("GPT", "cpu-core", 2**17, tried=tried)
    path = tmp_path / "page.html"
    path.write_text(report.html(history, plan, run, run, about))
    with browser.chromium() as driver:
        browser.opened(driver, path)
        run_script = driver.execute_script
        drawn = run_script(
            "return [...document.querySelectorAll('.js-plotly-plot')].map(e => e.id)"
        )
        assert drawn == ["stages", "timeline", "memory", "search"]
        paths = run_script("return document.querySelectorAll('#timeline path.js-fill').length")
        assert paths >= 8  # kinds of two runs
        moved = """
            const plot = document.getElementById("timeline"), {xaxis, yaxis} = plot._fullLayout;
            const box = plot.getBoundingClientRect();
            plot.dispatchEvent(new MouseEvent("mousemove", {
              clientX: box.left + xaxis._offset + xaxis.d2p(arguments[0]),
              clientY: box.top + yaxis._offset + yaxis.d2p(arguments[1])}));
            const tip = document.getElementById("tip");
            return tip.hidden ? "" : tip.textContent;"""
        first = next(event for event in run.timeline.events if event.rank == 0)
        middle = 500 * (first.start + first.end)
        said = run_script(moved, middle, -0.22)
        assert said.startswith(f"rank 0, predicted: forward ({first.action})")
        assert run_script(moved, middle, 0.22).startswith("rank 0, measured: forward")
        assert run_script(moved, middle, 0.5) == ""
        zoomed = """
            const [end, done] = arguments, whole = document.getElementById("memory");
            Plotly.relayout("timeline", {"xaxis.range": [0, end]});
            setTimeout(() => done(whole._fullLayout.xaxis.range[1]), 300);"""
        assert driver.execute_async_script(zoomed, 0.25) == 0.25
        shown = "return [...document.querySelectorAll('.pass')].map(e => e.open)"
        for at, key in ((None, ""), (0, RIGHT), (1, RIGHT), (0, LEFT)):
            if key:
                driver.find_element("tag name", "body").send_keys(key)
            assert run_script(shown) == [index == at for index in range(len(history))]
        search, said = (driver.find_element("id", name) for name in ("find", "hits"))
        search.send_keys("SEND(")  # as it stands, whatever its case
        kept = "return [...document.querySelectorAll('.pass')].map(e => !e.hidden)"
        whole = driver.execute_script(
            "return [...document.querySelectorAll('.pass')].map(e => e.textContent.toLowerCase())"
        )
        assert run_script(kept) == run_script(shown) == ["send(" in text for text in whole]
        count = sum(text.count("send(") for text in whole)
        assert count > 1 and said.text == f"1 of {count}"
        search.send_keys(ENTER)
        assert said.text == f"2 of {count}"
        search.send_keys("not there")
        assert said.text == "not found" and not any(run_script(kept))
        assert driver.get_log("browser") == []
