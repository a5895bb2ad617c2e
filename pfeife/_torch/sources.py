"""Sources: how Dynamo writes down where a value lives, such as `L['model']._parameters['w']`.

If they move: without their names parameters are called as Dynamo calls its placeholders, and
checkpoints by names no longer fit.
"""

import ast
import re
from typing import Any

import torch

from pfeife._torch.dynamo import STEP, name_of, translator


def placeholder_source(node: torch.fx.Node) -> str:
    """How Dynamo writes down where a placeholder's value lives: `L['model']._parameters['w']`.

    Read inside the backend call: Dynamo clears it afterwards.
    """
    argument = node.meta.get("grapharg")
    return name_of(getattr(argument, "source", None))


def _dynamo_roots() -> tuple[dict[str, Any], dict[str, Any]]:
    """The local and global variables of the frame that Dynamo compiles right now."""
    output = translator().output
    return dict(output.local_scope), dict(output.global_scope)


class Unresolved(LookupError):
    """A source that is no plain chain of names, attributes and items."""


def _walk(node: ast.expr) -> tuple[Any, list[str]]:
    """What part of a source names, and the words that a person would say for it."""
    # Nothing of a source is evaluated: it may name what costs time or has effects.
    scope = _dynamo_roots()
    match node:
        case ast.Subscript(value=ast.Name(id="L" | "G" as which), slice=ast.Constant(value=name)):
            return scope[which == "G"][str(name)], [] if name == STEP else [str(name)]
        # A cell is called as its variable. It comes before attributes, which would take it as well.
        case ast.Attribute(
            value=ast.Subscript(
                value=ast.Attribute(value=function, attr="__closure__"),
                slice=ast.Constant(value=int(index)),
            ),
            attr="cell_contents",
        ):
            holder, _ = _walk(function)
            return holder.__closure__[index].cell_contents, [holder.__code__.co_freevars[index]]
        case ast.Attribute(value=inner, attr=name):
            value, words = _walk(inner)
            plain = name in ("__self__", "_modules", "_parameters", "_buffers")
            return getattr(value, name), words if plain else [*words, name]
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            value, words = _walk(inner)
            return value[key], [*words, str(key)]
    raise Unresolved(ast.unparse(node))


def _resolved(source: str) -> tuple[Any, list[str]]:
    try:
        return _walk(ast.parse(source, mode="eval").body)
    except (LookupError, AttributeError, TypeError, SyntaxError):
        return None, re.findall(r"\w+", re.sub(r"^[LG]\b", "", source))


def source_value(source: str) -> Any:
    """What a source such as `L['self'].model` names in the frame that Dynamo compiles right now;
    None if that cannot be told."""
    return _resolved(source)[0]


def is_there(source: str, value: Any) -> bool:
    """Whether an attribute is this number or text already, by its source in the frame that Dynamo
    compiles right now; False if that cannot be told. (Of a list, its length might be another.)"""
    if source.endswith("]"):
        return False
    try:
        current = _walk(ast.parse(source, mode="eval").body)[0]
    except (LookupError, AttributeError, TypeError, SyntaxError):
        return False
    return type(current) is type(value) and bool(current == value)


def source_words(source: str) -> list[str]:
    """The names in a source as a person would say them: `["model", "table"]`."""
    return _resolved(source)[1] or ["step"]
