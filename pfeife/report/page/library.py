"""plotly.js as a page has it: its text, a little faster to start."""

import re

from pfeife.report.extra import plotly_script

# What registers every kind of drawing; scatter, all that a page has, is among what comes before.
_KINDS = re.compile(r"(\.register\(\[)(?:[\w$]+\(\),?){20,}(\]\);[\w$]+\.exports=)")
_HEAD, _TAIL = '} (typeof self !== "undefined" ? self : this, () => {', "}));"


def plotly() -> str:
    """plotly.js of the installed plotly. Raises ImportError without it.

    Starting it is half of a page's loading, so that two places are changed where they are found
    (plotly 6 and 7); a version in which they read otherwise is left as it is, and starts later.
    Drawings of kinds that no page has are not registered; and the function around everything stands
    in parentheses, at which V8 compiles it at once (https://v8.dev/blog/preparser#pife) where it
    reads it a second and a third time otherwise.
    """
    text = _KINDS.sub(r"\1\2", plotly_script().rstrip())
    if text.count(_HEAD) == 1 and text.endswith(_TAIL):
        text = text.replace(_HEAD, _HEAD.replace("() =>", "(() =>"))
        text = text.removesuffix(_TAIL) + "})));"
    return text
