"""A report as one HTML page, which needs no network.

`document` puts it together: read it first. `timelines` draws what ranks do over time, `memory` what
they hold, `stages` the graph of stages, `passes` what each pass has changed, `searched` the search;
`elements` writes HTML, and `figures` is what all drawings have of plotly. page.css is how it looks;
page.js has plotly draw, makes one clock of two figures, and answers keys and the pointer.
"""

from pfeife.report.page.document import About, html

__all__ = ["About", "html"]
