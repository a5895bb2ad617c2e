"""What people look at: texts and drawings of plans, timelines, memory and networks.

`tables` writes them; read it first. `compare` puts what was predicted beside what was measured,
`step_line` has a step in a line.
"""

from pfeife.report.compare import compare_memory, compare_times
from pfeife.report.step_line import step_line
from pfeife.report.tables import (
    calls_table,
    chrome_trace,
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
    "calls_table",
    "chrome_trace",
    "compare_memory",
    "compare_times",
    "comparison_table",
    "critical_table",
    "links_table",
    "memory_chart",
    "memory_table",
    "network_table",
    "plan_table",
    "rank_part",
    "size",
    "step_line",
    "summary",
    "table",
    "timeline_chart",
]
