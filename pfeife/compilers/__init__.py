"""Stage bodies through a compiler: torch's Inductor, or any function of the right signature.

`bodies` compiles those of a program, `piece` one of them; read these first. `draws` keeps random
numbers out of the compiled code, `open_sizes` compiles for all sizes of a batch, `cuda_graphs`
records it.
"""

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
