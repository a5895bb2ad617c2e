"""What people look at: texts and drawings of plans, timelines, memory and networks.

`tables` writes them; read it first. `compare` puts what was predicted beside what was measured,
`step_line` has a step in a line, `forecast` what a plan is expected to do, `forecast_text` the
same in words; `by_stage` adds up what they have of stages. `page/` is a report as HTML: `run` is
what it shows of a step, `spans` what of a timeline is drawn, and `extra` imports the libraries that
draw. `picture` draws a schedule as papers do, `drawn` the graph of a program, `perfetto` writes a
trace.
"""

from pfeife.report.compare import compare_memory, compare_times
from pfeife.report.drawn import dot, svg
from pfeife.report.forecast import forecast_of, waits_of
from pfeife.report.forecast_text import forecast_csv, forecast_summary, forecast_table
from pfeife.report.page import About, html
from pfeife.report.perfetto import chrome_trace
from pfeife.report.picture import picture
from pfeife.report.run import Run, Target, expected
from pfeife.report.spans import Span, What, idle, spans
from pfeife.report.step_line import step_line
from pfeife.report.tables import (
    calls_table,
    comparison_table,
    critical_table,
    links_table,
    memory_chart,
    memory_table,
    network_table,
    plan_table,
    rank_part,
    size,
    summary,
    table,
    timeline_chart,
)

__all__ = [
    "About",
    "Run",
    "Span",
    "Target",
    "What",
    "calls_table",
    "chrome_trace",
    "compare_memory",
    "compare_times",
    "comparison_table",
    "critical_table",
    "dot",
    "expected",
    "forecast_csv",
    "forecast_of",
    "forecast_summary",
    "forecast_table",
    "html",
    "idle",
    "links_table",
    "memory_chart",
    "memory_table",
    "network_table",
    "picture",
    "plan_table",
    "rank_part",
    "size",
    "spans",
    "step_line",
    "summary",
    "svg",
    "table",
    "timeline_chart",
    "waits_of",
]
