"""The page: what is in it, and that what it is given stays text."""

import json
from html.parser import HTMLParser

import attrs
import pytest
from programs import CPU_CORE, captured, clusters, lowered

import pfeife
from pfeife import report, sched
from pfeife.passes.compose import Recorded


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
    return {one["name"]: one for one in json.loads(page.texts["page-data"])["figures"]}


def test_a_page_has_what_is_known(made):
    """Each drawing has what it is given, plotly knows all of it, and nothing is fetched."""
    history, plan, run = made
    about = report.About("GPT on two ranks", "cpu-core", limit=2**20, notes=("Of the tests.",))
    text = report.html(history, plan, run, run.timeline, about)
    assert text == report.html(history, plan, run, run.timeline, about)
    page = Read(text)
    assert {"s-stages", "s-timeline", "s-memory", "s-passes"} <= page.ids()
    for word in ("GPT on two ranks", "Of the tests.", "cpu-core", "by its critical path", "saved"):
        assert word in page.said
    tabs = [found for _, found in page.elements if found.get("role") == "tab"]
    assert len(tabs) == len(history) and {one["aria-controls"] for one in tabs} <= page.ids()
    found = figures(page)
    assert found.keys() == {"stages", "timeline", "memory"}
    spans = found["timeline"]["more"]["spans"]
    drawn = [action for one in spans if one["what"] != "wait" for action in one["actions"]]
    events = [str(event.action) for event in run.timeline.events]
    assert sorted(drawn) == sorted(2 * events)
    graph_objects = pytest.importorskip("plotly.graph_objects")
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
    about = report.About(evil, evil, notes=(evil,))
    page = Read(report.html(renamed, plan, run, about=about))
    plain = Read(report.html(history, plan, run, about=attrs.evolve(about, notes=())))
    kinds = [tag for tag, _ in page.elements]
    assert kinds.count("script") == 3 and "img" not in kinds
    assert page.said.count(evil) > plain.said.count(evil) > 2
