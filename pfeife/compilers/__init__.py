"""Stage bodies through a compiler: torch's Inductor, or any function of the right signature."""

from pfeife.compilers.bodies import BodyCompiler, checked, compile_bodies, compiler_name
from pfeife.compilers.piece import COMPILERS, Compiler, example, fingerprint

__all__ = [
    "COMPILERS",
    "BodyCompiler",
    "Compiler",
    "checked",
    "compile_bodies",
    "compiler_name",
    "example",
    "fingerprint",
]
