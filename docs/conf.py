"""How Sphinx builds these pages (`make docs`). Warnings are errors there."""

import re

import pfeife

project = "Pfeife"
author = "Pfeife contributors"
release = pfeife.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # so that pages link to headings of each other
exclude_patterns = ["_build"]
default_role = "code"  # docstrings have `names` in single backticks
html_theme = "furo"
html_title = f"Pfeife {release}"
html_show_sourcelink = False
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88  # a parameter a line beyond that

ARGUMENT = re.compile(r"^((?:`?\w+`?, )*`?\w+`?(?: \([^)]*\))?): (.*)")


def spell(lines: list[str]) -> list[str]:
    """Our docstrings as reStructuredText: lines of `name: what it is`, which go on indented, are a
    list there."""
    text: list[str] = []
    listed = False
    for line in lines:
        found = ARGUMENT.match(line)
        begins = not text or not text[-1].strip() or listed
        if found and begins:
            text += [""] if text and not listed else []
            text.append(f"* **{found[1].replace('`', '')}**: {found[2]}")
            listed = True
        elif listed and line.startswith("    "):
            text.append(f"  {line.strip()}")
        else:
            if listed and line.strip():
                text.append("")
            listed = False
            text.append(line)
    return text


# What Python writes of a default or a type, and what a reader takes from it.
PLAINLY = [(r"<function <lambda>>", "..."), (r"<function ([\w.]+)>", r"\1")]
PLAINLY += [(r"\bNOTHING\b", "..."), (r"~typing\.~P", "Any")]


def setup(app):
    def docstring(app, what, name, thing, options, lines):
        lines[:] = spell(lines)

    def signature(app, what, name, thing, options, arguments, returned):
        for written, plainly in PLAINLY:
            arguments = arguments and re.sub(written, plainly, arguments)
        return arguments, returned

    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
