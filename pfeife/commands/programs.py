"""The flat program of a step that words are about, captured or from the cache."""

import argparse
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.commands.arguments import PRECISIONS
from pfeife.commands.batches import Wanted
from pfeife.commands.models import ModelRequest, asked
from pfeife.data import files, plain
from pfeife.data.progress import Progress, shown
from pfeife.forecasting import Outlook, Question, clusters_of, flat_program, outlook
from pfeife.frontend.batch import Cutter, Indivisible
from pfeife.frontend.cache import capture_cache
from pfeife.frontend.cache.capture_key import sources
from pfeife.frontend.cache.program_json import StoredProgram, restore, store
from pfeife.ir.microbatch import rows_and_tokens
from pfeife.ir.parts import Role
from pfeife.ir.program import Program

log = logging.getLogger("pfeife")


@attrs.frozen(eq=False)
class CapturedModel:
    """A flat program, and what a person should know of it."""

    program: Program
    note: str = ""


def saved(what: str) -> StoredProgram | None:
    """The saved program of a path, None if it is that of something else."""
    if not what.endswith(".json") or not Path(what).is_file():
        return None
    # A config.json is JSON as well, and so its fields decide.
    text = files.read_text(Path(what), plain.LARGEST_FILE)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None  # who reads it as a configuration says what is wrong
    if not isinstance(data, Mapping) or not {"nodes", "texts"} <= set(data):
        return None
    return plain.load(StoredProgram, what)


@attrs.frozen(eq=False)
class Captures:
    """The flat programs that a command plans: the saved one, or one for each size of a microbatch;
    and their clusters by what these depend on."""

    stored: StoredProgram | None
    by_size: dict[tuple[float, int | None], CapturedModel] = attrs.field(factory=dict)
    clusters: dict[Any, Sequence[Program]] = attrs.field(factory=dict)

    def size(self, options: argparse.Namespace) -> tuple[float, int | None]:
        """What a capture depends on: the rows of a microbatch (one, unless a batch is given) and
        their tokens. Machine, schedule and all others are decided on the same one."""
        return (options.batch or options.microbatches) / options.microbatches, options.sequence

    def of(self, options: argparse.Namespace) -> CapturedModel:
        """The program of a microbatch that options ask for. Raises ValueError if there is none."""
        size = self.size(options)
        if size not in self.by_size:
            self.by_size[size] = _checked(options, self.stored)
        return self.by_size[size]

    def outlook(
        self, options: argparse.Namespace, question: Question, progress: Progress | None = None
    ) -> Outlook:
        """The answer to a question about that program."""
        links = question.on.link_latency, question.on.link_bandwidth
        how = str(question.parallel), question.attention, question.share
        cut = (question.members, *how, links) if question.members > 1 else ()
        kind = (self.size(options), question.machine, question.master, question.splits, cut)
        if kind not in self.clusters:
            self.clusters[kind] = clusters_of(self.of(options).program, question)
        return outlook(self.clusters[kind], question, progress)


def opened(options: argparse.Namespace) -> tuple[argparse.Namespace, Captures]:
    """The options with the precision that was asked for, or else that of a saved program, and where
    programs come from. Raises ValueError for a precision that there is not."""
    stored = saved(options.what)
    precision = stored.asked.get("precision", "fp32") if stored else "fp32"
    if precision not in PRECISIONS:
        raise ValueError(
            f"{options.what}: it says the precision {precision[:80]!r}, which there is not"
        )
    return changed(options, precision=options.precision or precision), Captures(stored)


def changed(options: argparse.Namespace, **more: Any) -> argparse.Namespace:
    """The same options but for some."""
    return argparse.Namespace(**{**vars(options), **more})


def words_of(options: argparse.Namespace, program: Program) -> dict[str, str]:
    """What was asked for, by names, and the command that asks so."""
    rows, tokens = rows_and_tokens(program)
    # Unless a batch was asked for, it is what the program has: a saved one may have any rows.
    batch = options.batch or rows * options.microbatches
    words = {
        "precision": options.precision,
        "optimizer": options.optimizer or "none",
        "batch": batch,
        "sequence": tokens // rows if tokens else "",
        "microbatches": options.microbatches,
        "machine": options.machine,
        "command": options.typed,
    }
    return {name: str(word) for name, word in words.items() if word != ""}


def wanted_of(options: argparse.Namespace) -> Wanted:
    """What the options of a step say."""
    dtype = getattr(torch, PRECISIONS[options.precision or "fp32"][0])
    rows = options.batch or options.microbatches
    settings, inputs = dict(options.settings), dict(options.inputs)
    return Wanted(options.what, settings, rows, options.batch, options.sequence, inputs, dtype)


def folder_of(options: argparse.Namespace) -> Path | None:
    """Where captures are kept."""
    if options.no_cache:
        return None
    if options.cache:
        return Path(options.cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pfeife"


def _checked(options: argparse.Namespace, stored: StoredProgram | None) -> CapturedModel:
    """A program whose parameters have the precision that was asked for."""
    captured = _found(options, stored)
    dtype = str(wanted_of(options).dtype).removeprefix("torch.")
    ports = captured.program.ports(Role.PARAMETER)
    dtypes = sorted({str(port.dtype).removeprefix("torch.") for port in ports})
    # float32 may be nobody's wish: it is what there is without the option. And one parameter of the
    # type is enough, since a model may keep others (of norms) in a wider one on purpose.
    if dtype != "float32" and dtypes and dtype not in dtypes:
        raise ValueError(
            f"--precision {options.precision}: the parameters of {options.what} are {dtypes}; make "
            "the model inside of the function, where new modules have the precision that was asked "
            "for, or leave the option out"
        )
    return captured


def _found(options: argparse.Namespace, stored: StoredProgram | None) -> CapturedModel:
    if stored is not None:
        return CapturedModel(_meant(restore(stored)))
    with shown(log).phase("making the model"):
        request = asked(wanted_of(options))
    with shown(log).phase("capturing"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo, about the insides of libraries
        return CapturedModel(
            _captured(request, options.microbatches, folder_of(options)), request.note
        )


def save(program: Program, path: str, words: Mapping[str, str]) -> None:
    """Writes a flat program, and what it was asked for with, so that it can be planned again."""
    plain.save(attrs.evolve(store(_bare(program), "saved"), asked=dict(words)), path)


def _meant(program: Program) -> Program:
    """A restored program, whose loss is a mean as that of every captured one here."""
    outputs = (
        attrs.evolve(port, reduction="mean") if port.role == Role.LOSS else port
        for port in program.outputs
    )
    return attrs.evolve(program, outputs=tuple(outputs))


def _bare(program: Program) -> Program:
    """A program as it is before anybody has said how its microbatches are put together."""
    # Reductions are asked again where it is restored: another step may join its losses otherwise.
    outputs = (attrs.evolve(port, reduction=None, counts=()) for port in program.outputs)
    return attrs.evolve(program, outputs=tuple(outputs), counts=(), premises=())


def _captured(request: ModelRequest, microbatches: int, cache: Path | None) -> Program:
    try:
        cut = Cutter(request.step, 0, microbatches)(request.args, request.kwargs)
    except Indivisible as error:
        raise ValueError(
            f"--microbatches {microbatches}: {error.said}; take --microbatches {error.fits}, or a "
            f"--batch that {microbatches} divides"
        ) from None

    def capture(inner: Path | None) -> Program:
        return flat_program(request.step, *cut.args, cache=inner, **cut.kwargs)

    # Without a key of words `capture` looks the program up by what Dynamo has traced. With one not
    # even Dynamo needs to run: the words are looked up first, and `capture` then has no cache.
    if cache is None or request.key is None:
        return capture(cache)
    folder, key = cache / capture_cache.FOLDER, _key(request.key, microbatches)
    cached = capture_cache.find(folder, key)
    if cached is None:
        program = capture(None)
        try:
            capture_cache.keep(folder, store(_bare(program), key))
        except ValueError as reason:
            log.info("this capture is not kept: %s", reason)
        return program
    log.info("the capture is from the cache in %s", folder)
    return _meant(cached)


def _key(words: str, microbatches: int) -> str:
    """A digest of a library's model and its batch, and of all code that makes a program of it."""
    lines = [f"{words} in {microbatches}", sources(Path(__file__).parent.parent)]
    lines += _torch.surroundings([torch.device("cpu")])
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()
