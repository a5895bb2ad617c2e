"""A program as the text of a Python file that runs with torch alone."""

import inspect
import re
from typing import Any

import torch
from torch import fx

from pfeife.ir.nodes import attribute, receive, send, size_tensor
from pfeife.ir.parts import Port, ProgramBase, captured_sizes

LARGEST = 2**16  # elements of the constants that a text may have
_ALONE = (send, receive, size_tensor)  # whose own text needs no more than torch


def source(program: ProgramBase) -> str:
    """See `Program.source`."""
    writer = _Writer()
    writer.add("Program", program.module)
    return "\n\n".join(
        [
            '"""A program, written by Pfeife: `Program()(...)` computes one microbatch."""',
            "\n".join([*sorted(writer.imports), "", *_ports(program)]),
            *writer.functions.values(),
            *writer.classes,
            _main(program),
        ]
    )


def _ports(program: ProgramBase) -> list[str]:
    takes = [f"# {port}" for port in program.inputs]
    return [*takes, *(f"# -> {port}" for port in program.outputs)]


def _main(program: ProgramBase) -> str:
    """Runs the program on zeros, so that the file is a script."""
    sizes = captured_sizes(program)
    arguments = ",\n        ".join(
        str(sizes[port.name]) if port.name in sizes else _zeros(port) for port in program.inputs
    )
    return (
        'if __name__ == "__main__":\n'
        f"    results = Program()(\n        {arguments},\n    )\n"
        "    for name, value in results.items():\n"
        "        print(name, value.dtype, list(value.shape))\n"
    )


def _zeros(port: Port) -> str:
    return f"torch.zeros({list(port.shape)}, dtype={port.dtype}, device={str(port.device)!r})"


class _Writer:
    """Collects what a file needs: imports, functions of ours, a class for each graph module."""

    def __init__(self) -> None:
        self.imports = {"import torch"}
        self.functions: dict[str, str] = {}
        self.classes: list[str] = []

    def add(self, name: str, module: fx.GraphModule) -> None:
        """A class for a module, behind those of the modules that it calls."""
        code = module.graph.python_code("self", verbose=True)
        for alias, value in code.globals.items():
            if re.search(rf"\b{alias}\b", code.src):  # fx lists more than it writes
                self._needs(alias, value)
        held = {str(n.target) for n in module.graph.nodes if n.op in ("get_attr", "call_module")}
        sets = [f"self.{target} = {self._held(name, module, target)}" for target in sorted(held)]
        constructor = [
            "def __init__(self):",
            "    super().__init__()",
            *(f"    {assignment}" for assignment in sets),
        ]
        lines = [*constructor, "", *code.src.strip("\n").splitlines()]
        indented = "\n".join(f"    {line}".rstrip() for line in lines)
        self.classes.append(f"class {name}(torch.nn.Module):\n{indented}\n")

    def _held(self, name: str, module: fx.GraphModule, target: str) -> str:
        value = attribute(module, target)
        if isinstance(value, fx.GraphModule):
            inner = f"{name}_{target}".replace(".", "_").removeprefix("Program_")
            self.add(inner, value)
            return f"{inner}()"
        if not isinstance(value, torch.Tensor) or value.numel() > LARGEST:
            has = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else type(value)
            raise ValueError(
                f"the constant {target} has {has}; a text takes tensors of up to {LARGEST} elements"
            )
        self.imports.add("from math import inf, nan")
        where = f"dtype={value.dtype}, device={str(value.device)!r}"
        return f"torch.tensor({value.tolist()}, {where}).reshape({list(value.shape)})"

    def _needs(self, alias: str, value: Any) -> None:
        """An import for a global of a graph's code, or a function's own text."""
        home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", alias)
        if alias in ("inf", "nan"):
            self.imports.add("from math import inf, nan")
        elif inspect.ismodule(value):
            self.imports.add(
                f"import {value.__name__}" + f" as {alias}" * (value.__name__ != alias)
            )
        elif value in _ALONE:
            text = inspect.getsource(value).replace(": Any", "")
            self.functions[alias] = f"{text}\n\n{alias} = {name}" if alias != name else text
        elif home is None or not name.isidentifier():
            raise ValueError(f"{alias} of the graph ({value!r}) has no name to import it by")
        else:
            self.imports.add(f"from {home} import {name}" + f" as {alias}" * (name != alias))
