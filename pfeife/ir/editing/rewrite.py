"""Changing a program as fx's own tools change a graph, on copies."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from torch import fx
from torch.fx import subgraph_rewriter

from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.nodes import returned, value_of
from pfeife.ir.parts import AProgram, ProgramBase

Where = Literal["bodies", "calls"]
Edit = Callable[[fx.GraphModule], object]


@attrs.frozen
class Operation:
    """One operation of a graph that is rewritten: `target` with `args` and `kwargs`, whose nodes
    are those of the new graph; `node` is the old one, with its `meta` and users."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: fx.Graph

    @property
    def target(self) -> Any:
        """The function of torch.ops, or of Python, that it calls."""
        return self.node.target

    @property
    def value(self) -> Any:
        """The fake tensor that stands for the old node's value: its shape, dtype and device."""
        return self.node.meta.get("val")

    def make(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new node here, of the same line of the model."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {name: value for name, value in self.node.meta.items() if name not in _TOLD}
        return node


_TOLD = ("val", "sizes", "tensor_meta")  # of a value: told anew
Rewrite = Callable[[Operation], fx.Node | None]


def rewrite(program: AProgram, function: Rewrite, of: Where = "bodies") -> AProgram:
    """See `Program.rewrite`."""
    return edit(program, lambda module: _rewritten(module, function), of)


def _rewritten(module: fx.GraphModule, function: Rewrite) -> fx.GraphModule:
    def change(node: fx.Node, copy: Copy) -> fx.Node | None:
        if node.op != "call_function":
            return None
        args, kwargs = copy.read((node.args, node.kwargs))
        replacement = function(Operation(node, args, kwargs, copy.graph))
        if replacement is None or (
            isinstance(replacement, fx.Node) and replacement.graph is copy.graph
        ):
            return replacement
        raise ValueError(
            f"the rewrite of {node.format_node()} gave {replacement!r}; it gives a node that "
            "`make` has made or that is in the operation's arguments, or None to keep it"
        )

    return copied(module, change).module()


def replace(
    program: AProgram,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    of: Where = "bodies",
) -> AProgram:
    """See `Program.replace`."""

    def change(module: fx.GraphModule) -> None:
        matches = subgraph_rewriter.replace_pattern_with_filters(module, pattern, replacement)
        for match in matches:
            lines = {k: v for k, v in match.anchor.meta.items() if k not in _TOLD}
            # what is put in has no line of the model: it gets that of what it replaces
            for node in match.replacements:
                node.meta = lines | node.meta

    return edit(program, change, of)


def edit(program: AProgram, change: Edit, of: Where = "bodies") -> AProgram:
    """See `Program.edit`."""
    if program.calls and of == "bodies":
        module = copied(program.module).module()
        new: dict[int, fx.GraphModule] = {}  # calls may share a body
        for call in program.calls:
            body, target = program.body(call), str(program.node(call.node).target)
            # By identity, once: a `change` that draws or counts would make two bodies of a shared
            # one.
            new[id(body)] = new.get(id(body)) or _edited(body, change)
            _check_ends(call.node, body, new[id(body)])
            module.add_submodule(target, new[id(body)])
    else:
        module = _edited(program.module, change)
    # what was put in has no values yet, and the check of the ports looks at them
    result = settle(attrs.evolve(program, module=module))
    _check_ports(program, result)
    return result


def _edited(module: fx.GraphModule, change: Edit) -> fx.GraphModule:
    copy = copied(module).module()
    outcome = change(copy)
    result = outcome if isinstance(outcome, fx.GraphModule) else copy
    result.graph.lint()
    result.recompile()
    return result


def _check_ends(call: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
    """A call passes what its body has taken, and takes what this has returned, by position."""
    old, new = ((_arguments(body), len(returned(body))) for body in (before, after))
    if old != new:
        raise ValueError(
            f"the body of {call} took {old[0]} arguments and gave {old[1]} results, now {new[0]} "
            f'and {new[1]}; to change what calls exchange, edit their graph too (of="calls")'
        )


def _arguments(body: fx.GraphModule) -> int:
    return sum(node.op == "placeholder" for node in body.graph.nodes)


def _check_ports(before: ProgramBase, after: ProgramBase) -> None:
    """Ports say what goes in and comes out: a pass that changes one changes the port too."""
    for name, node in returned(before.module).items():
        new_node = returned(after.module).get(name)
        if new_node is None or _form(new_node) != _form(node):
            has = "is gone" if new_node is None else f"has become {_form(new_node)}"
            raise ValueError(
                f"the rewrite changes the output {name}: it was {_form(node)} and {has}; cast or "
                "reshape it back, for whoever runs the program goes by its ports"
            )


def _form(node: fx.Node) -> str:
    value = value_of(node)
    return "no tensor" if value is None else f"{value.dtype} {list(value.shape)}"
