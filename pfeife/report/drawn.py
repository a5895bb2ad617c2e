"""The graph of a program as DOT, and as an SVG that graphviz draws."""

import shutil
from typing import Any

from pfeife.data.units import duration, flops, size
from pfeife.ir.program import Program
from pfeife.report.extra import pydot

_FILLS = {"F": "#cfe2f3", "B": "#fce5cd", "I": "#f9cb9c", "W": "#fff2cc", "op": "#eeeeee"}


def dot(program: Program) -> str:
    """`program.graph()` in graphviz's language: a box a call with its rank, time and FLOPs, a box a
    plain operation, bytes on the edges, and messages dashed. Raises ImportError without pydot
    (`pip install 'pfeife[report]'`)."""
    return str(_drawn(program).to_string())


def svg(program: Program) -> str:
    """The same, drawn by graphviz's program `dot`. Raises ImportError without pydot, and ValueError
    without that program, which pip does not install (`apt install graphviz`)."""
    # pydot raises FileNotFoundError there, which does not say what to install.
    drawn = _drawn(program)
    if shutil.which("dot") is None:
        raise ValueError(
            "an SVG of a graph is drawn by graphviz's program dot, which is not on the PATH: apt "
            "install graphviz, or give the text of report.dot(program) to any viewer of DOT"
        )
    return str(drawn.create_svg(prog="dot").decode())


def _drawn(program: Program) -> Any:
    library, graph = pydot(), program.graph()
    drawn = library.Dot("program", rankdir="TB")
    drawn.set_node_defaults(shape="box", style="filled", fontname="sans-serif", fontsize="10")
    drawn.set_edge_defaults(fontname="sans-serif", fontsize="9")
    for name, data in graph.nodes(data=True):
        # graphviz breaks lines at its own \\n, which has to reach it as two letters.
        text = _quoted("\\n".join(_words(name, data)))
        drawn.add_node(
            library.Node(_quoted(name), label=text, fillcolor=_quoted(_FILLS[data["kind"]]))
        )
    for source, reader, data in graph.edges(data=True):
        style = "dashed" if data["sent"] else "solid"
        label = _quoted(size(data["bytes"]))
        drawn.add_edge(library.Edge(_quoted(source), _quoted(reader), label=label, style=style))
    return drawn


def _words(name: str, data: dict[str, Any]) -> list[str]:
    where = [f"rank {data['rank']}"] if "rank" in data else []
    where += [duration(data["seconds"])] if "seconds" in data else []
    where += [flops(data["flops"])] if data["flops"] else []
    return [name, *([", ".join(where)] if where else [])]


def _quoted(text: str) -> str:
    # What stands in quotes is text in DOT; without, a name with a dot or a colon means a port.
    return '"' + text.replace('"', "'") + '"'
