"""A report as one HTML page, which needs no network.

`document` puts it together: read it first. `timelines` draws what ranks do over time, `memory` what
they hold, `stages` the graph of stages, `passes` what each pass has changed, `searched` the search;
`elements` writes HTML, and `library` is plotly. page.css and page.js are how it looks and what its
keys do.
"""

from pfeife.report.page.document import About, html

__all__ = ["About", "html"]
