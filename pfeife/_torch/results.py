"""What a frame returns and assigns, which Dynamo does in code of its own after the graph."""

import collections
import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfeife._torch.dynamo import name_of, translator
from pfeife._torch.sources import source_value


def result_paths() -> list[tuple[tuple[int | str, ...], torch.fx.Node]] | None:
    """Where the tensors stand in what the frame returns that Dynamo compiles right now, with their
    nodes, in order; None where the frame ends at a graph break, or returns an object of a class
    that is no tuple, list, mapping or dataclass.

    Dynamo has what is returned on its stack. The graph's results are in an order of its own, and
    nothing public tells which is which. If it moves: return None, and an index means the graph's
    results.
    """
    stack = translator().stack
    # At a graph break the stack has what the rest of the frame needs.
    if len(stack) != 1:
        return None
    paths: list[tuple[tuple[int | str, ...], torch.fx.Node]] = []
    for path, value in _leaves(stack[-1].realize()):
        if hasattr(value, "proxy"):
            # Symbolic numbers have a proxy, too.
            if "Tensor" in type(value).__name__ and isinstance(value.proxy, torch.fx.Proxy):
                paths.append((path, value.proxy.node))
        # An object may have tensors that nobody sees here: then an index is all that can be said.
        elif not value.is_python_constant():
            return None
    return paths


def assigned() -> dict[torch.fx.Node, list[str]]:
    """The nodes of the graph that Dynamo compiles right now, each with the attributes, entries of
    dicts and cells that will hold its value after the call, as sources.

    Dynamo does the assignments in code of its own, after the graph. Nothing public tells of them.
    If it moves: return {}, and such a value is taken for a result of the step.
    """
    sources_of: dict[torch.fx.Node, list[str]] = {}
    for source, value in _written(dict):
        if isinstance(getattr(value, "proxy", None), torch.fx.Proxy):
            sources_of.setdefault(value.proxy.node, []).append(source)
    return sources_of


def changed_attributes() -> list[tuple[Any, str, Any, Any]]:
    """Attributes that the frame that Dynamo compiles right now sets to another number, text or
    flag, or to a tensor where there was none: the holder, the name, the value that it has, and what
    it will have, a tensor by its node. If it moves: return [], and nobody sees that a later
    microbatch would take another way."""
    changes = []
    for holder, name, new in _set_attributes():
        old = getattr(holder, name, None)
        # A tensor in place of a tensor is state that goes on to the next microbatch (`assigned`);
        # what is not realized the step has not read.
        if isinstance(old, torch.Tensor) or not new.is_realized():
            continue
        if isinstance(getattr(new, "proxy", None), torch.fx.Proxy):
            changes.append((holder, name, old, new.proxy.node))
        elif new.is_python_constant() and new.as_python_constant() != old:
            changes.append((holder, name, old, new.as_python_constant()))
    return changes


def changed_containers() -> list[tuple[Any, str | None, Any]]:
    """What the frame that Dynamo compiles right now leaves in lists, dicts and tuples, if there are
    tensors that it computes: an object, the attribute that it sets to a new container, and that as
    it will be, with nodes in place of tensors; or a container whose entries it changes, None, and
    its entries then. Buffers that a module registers are such entries. `OPAQUE` stands for objects
    of classes that the step makes. If it moves: return [], and nobody sees that a later microbatch
    would find something else there."""
    changes: list[tuple[Any, str | None, Any]] = []
    for holder, name, new in _set_attributes():
        if new.is_realized() and not hasattr(new, "proxy"):
            changes.append((holder, name, _built(new)))
    effects = translator().output.side_effects
    for variable in effects.id_to_variable.values():
        entries = _entries(variable)
        container = None if entries is None else _object_of(variable)
        if container is None or not effects.is_modified(variable):
            continue
        if isinstance(container, list | collections.deque):
            changes.append((container, None, _built_of(entries, list)))
        elif isinstance(container, dict):
            after = _without_carried(container, _built_of(entries, dict))
            changes.append((container, None, after))
    return [change for change in changes if _has_nodes(change[2])]


class Opaque(enum.Enum):
    """A value of Dynamo's that is more than containers, numbers and tensors."""

    OPAQUE = "opaque"


OPAQUE = Opaque.OPAQUE


def _entries(value: Any) -> Any:
    """The entries of a dict, list or tuple as Dynamo has it, also of a class of its own; None of
    anything else."""
    inside = getattr(value, "items", None)
    if isinstance(inside, dict | list | tuple):
        return inside
    held = next(filter(None, (getattr(value, name, None) for name in _HELD)), None)
    inside = getattr(held, "items", None)
    return inside if isinstance(inside, dict | list | tuple) else None


def _built(value: Any) -> Any:
    """A value as Dynamo has it, with nodes in place of tensors."""
    if not hasattr(value, "realize"):
        return OPAQUE
    value = value.realize()
    if isinstance(getattr(value, "proxy", None), torch.fx.Proxy):
        return value.proxy.node
    if value.is_python_constant():
        return value.as_python_constant()
    # What was there before stays that object; only what the step makes is built here.
    original = _object_of(value)
    if original is not None:
        return original
    with contextlib.suppress(NotImplementedError):
        return _built_of(_entries(value), value.python_type())
    return OPAQUE


def _built_of(inside: Any, kind: type) -> Any:
    """A container of a kind with such entries."""
    if isinstance(inside, dict) and kind is dict:
        keys: list[Any] = [getattr(key, "vt", key) for key in inside]
        if not all(key.is_python_constant() for key in keys):
            return OPAQUE
        plain = (key.as_python_constant() for key in keys)
        return dict(zip(plain, map(_built, inside.values()), strict=True))
    if inside is not None and kind in (list, tuple, collections.deque):
        values = list(map(_built, inside))
        return tuple(values) if kind is tuple else values
    return OPAQUE


def _without_carried(before: dict[Any, Any], after: Any) -> Any:
    """The entries of a dict, in which tensors stay that others replace: those are state that goes
    from microbatch to microbatch (see `assigned`)."""
    if type(before) not in (dict, collections.OrderedDict) or not isinstance(after, dict):
        return after
    return {
        key: before[key]
        if isinstance(new, torch.fx.Node) and isinstance(before.get(key), torch.Tensor)
        else new
        for key, new in after.items()
    }


def _has_nodes(value: Any) -> bool:
    return any(
        leaf is OPAQUE or isinstance(leaf, torch.fx.Node) for leaf in pytree.tree_leaves(value)
    )


def _set_attributes() -> Iterator[tuple[Any, str, Any]]:
    """The attributes that the frame that Dynamo compiles right now sets of objects that it has not
    made itself: the object, the name, and the new value as Dynamo has it."""
    for holder, written in translator().output.side_effects.store_attr_mutations.items():
        owner = _object_of(holder)
        if owner is not None:
            yield from ((owner, attribute, value.unwrap()) for attribute, value in written.items())


def assigned_constants() -> dict[str, Any]:
    """What Python alone has computed (numbers, texts) of what the frame that Dynamo compiles right
    now assigns to attributes, entries of dicts and lists, and cells, by sources. If it moves:
    return {}, and nobody sees that such a number is one microbatch's."""
    return {
        source + "".join(f"[{key!r}]" for key in path): leaf.as_python_constant()
        for source, value in _written(dict | list)
        for path, leaf in _leaves(value)
        if leaf.is_python_constant()
    }


def _written(containers: Any) -> Iterator[tuple[str, Any]]:
    """What the frame that Dynamo compiles right now assigns, as Dynamo has it, and the sources of
    the places: attributes, cells, and the entries of changed containers of these types."""
    effects = translator().output.side_effects
    places = [
        (holder, f".{name}", value)
        for holder, written in effects.store_attr_mutations.items()
        for name, value in written.items()
    ]
    for variable in effects.id_to_variable.values():
        inside = getattr(variable, "items", None)
        if isinstance(inside, containers) and effects.is_modified(variable):
            pairs = inside.items() if isinstance(inside, dict) else enumerate(inside)
            places += [(variable, f"[{_plain_key(key)!r}]", value) for key, value in pairs]
    for holder, key, value in places:
        name, seen = _source_of(holder), value.unwrap()
        if name and seen.is_realized():  # else the step has not read it
            yield f"{name}{key}", seen


def _source_of(variable: Any) -> str:
    """Where a value as Dynamo has it comes from, "" for one that the step has made."""
    with contextlib.suppress(NotImplementedError):
        return name_of(getattr(variable, "source", None))
    return ""


def _object_of(variable: Any) -> Any:
    """What was there before the step for a value as Dynamo has it; None for one that the step has
    made, and where that cannot be told."""
    source = _source_of(variable)
    return source_value(source) if source else None


def _leaves(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple, Any]]:
    """The values that are inside of a value as Dynamo has it, and where they stand in it: those
    in tuples, lists, mappings and objects that the step has made."""
    if hasattr(value, "proxy") or value.is_python_constant():
        yield path, value
        return
    inside = getattr(value, "items", None)
    if not isinstance(inside, list | tuple | dict):
        held = next(filter(None, (getattr(value, n, None) for n in _HELD)), None)
        if held is not None:
            yield from _leaves(held.realize(), path)
            return
        inside = translator().output.side_effects.store_attr_mutations.get(value)
    if inside is None:
        yield path, value
        return
    for key, entry in inside.items() if isinstance(inside, dict) else enumerate(inside):
        yield from _leaves(entry.realize(), (*path, _plain_key(key)))


_HELD = ("_base_vt", "_dict_vt", "_tuple_vt", "_list_vt")  # what a subclass of a dict or tuple has


def _plain_key(key: Any) -> int | str:
    """A key of a dict as Dynamo has it."""
    value = key.vt.as_python_constant() if hasattr(key, "vt") else key
    return value if isinstance(value, int | str) else str(value)
