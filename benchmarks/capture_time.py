"""How long a first call takes until the step runs, beside torch's own `aot_eager`.

    python benchmarks/capture_time.py [--repeats 3] [--only gpt] [--door dynamo]
    python benchmarks/capture_time.py --shapes [rows] [--repeats 3] [--only gpt]
    python benchmarks/capture_time.py --what-if [--repeats 3] [--only gpt-48]

For each model one call and its backward by `torch.compile(step, backend="aot_eager")`, and by
`pfeife.compile` with 4 microbatches in 2 stages, in processes of their own and in turn, so that a
busy machine slows both. Times are seconds of the CPU, medians; what is captured includes the checks
of a first call. `gpt2-meta` is of GPT-2's width and lives on no device: captured and planned alone.

With `--shapes` two more calls follow, each with longer sequences or larger pictures than the ones
before, or with more rows: the second program is for all of them. Of what Dynamo breaks `aot_eager`
compiles the pieces.

With `--what-if` the two GPTs are captured, fused and planned alone: without a cache of captures,
with an empty one, and once more with what that has kept.
"""

import argparse
import functools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine

MODELS = ("gpt-48", "bert-12", "resnet-50", "gpt2-meta")
SHAPES = ("gpt-4", "gpt-12", "gpt-48", "bert-12", "longformer", "unet")
WHAT_IF = ("gpt-48", "gpt2-meta")
OPTIONS = {"microbatches": 4, "stages": 2, "progress": False}
PHASES = {"capturing": "capture", "fusing": "fuse", "planning": "plan", "first step": "first step"}
CALLS = ("first", "second", "third")
Step = Callable[..., torch.Tensor]


def language(layers: int, width: int, device: str = "cpu") -> tuple[Step, tuple[torch.Tensor, ...]]:
    """Hugging Face's GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 256, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 32}
    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config(**sizes, **(small if width < 128 else {})))
        tokens = torch.zeros(8, 16, dtype=torch.long)
    return lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss, (tokens,)


def bert(layers: int) -> tuple[Step, tuple[torch.Tensor, ...]]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
    config = BertConfig(num_hidden_layers=layers, vocab_size=256, **sizes)
    model, tokens = BertForMaskedLM(config), torch.randint(256, (8, 16))
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss, (tokens,)


def resnet() -> tuple[Step, tuple[torch.Tensor, ...]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64, 128], num_labels=10)
    model = ResNetForImageClassification(config)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    return lambda x, y: F.cross_entropy(model(x).logits, y), (images, labels)


def longformer() -> tuple[Step, tuple[torch.Tensor, ...]]:
    """With global attention on the first word, which asks for values of the mask."""
    from transformers import LongformerConfig, LongformerForMaskedLM

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = LongformerConfig(
        num_hidden_layers=2, vocab_size=256, attention_window=[8, 8], pad_token_id=0, **sizes
    )
    model, tokens = LongformerForMaskedLM(config), torch.randint(1, 256, (8, 16))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        first = torch.zeros_like(tokens)
        first[:, 0] = 1
        return model(input_ids=tokens, labels=tokens, global_attention_mask=first).loss

    return step, (tokens,)


def unet() -> tuple[Step, tuple[torch.Tensor, ...]]:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
    )
    images, times = torch.randn(8, 3, 16, 16), torch.randint(100, (8,))
    return lambda x, t: model(x, t).sample.square().mean(), (images, times)


def larger(batch: Sequence[torch.Tensor], more: int, what: str) -> tuple[torch.Tensor, ...]:
    """Sequences that are so much longer, or pictures that are larger in both dimensions; or as many
    rows more."""
    if what == "rows":
        return tuple(torch.cat([x, x, x])[: len(x) + more] for x in batch)
    pads = {2: (0, more), 4: (0, more, 0, more)}
    return tuple(F.pad(x, pads[x.dim()], value=1) if x.dim() in pads else x for x in batch)


def case(name: str) -> tuple[Step, tuple[torch.Tensor, ...]]:
    found = {
        "gpt-4": lambda: language(4, 64),
        "gpt-12": lambda: language(12, 64),
        "gpt-48": lambda: language(48, 64),
        "bert-12": lambda: bert(12),
        "resnet-50": resnet,
        "longformer": longformer,
        "unet": unet,
        "gpt2-meta": lambda: language(48, 1600, "meta"),
    }
    return found[name]()


class _Phases(logging.Handler):
    """Notes when each phase has ended, in seconds of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage().partition(",")[0]
        if said in PHASES:
            self.ends.append((PHASES[said], time.process_time()))


def one(name: str, how: str, door: str, cache: str | None = None) -> dict[str, float]:
    """The seconds of one way, once torch has been warmed up by a small step; `wall` are those of
    the clock."""
    torch.set_num_threads(1)
    small = nn.Linear(4, 4)
    torch.compile(lambda x: small(x).sum(), backend="aot_eager")(torch.ones(2, 4)).backward()
    pfeife.compile(lambda x: small(x).sum(), microbatches=2)(torch.ones(2, 4)).backward()
    step, batch = case(name)
    phases = _Phases()
    log = logging.getLogger("pfeife")
    log.addHandler(phases)
    log.setLevel(logging.INFO)
    start, begin = time.process_time(), time.perf_counter()
    if "-" in how and how != "what-if":
        what, _, by = how.partition("-")
        compiled = (
            torch.compile(step, backend="aot_eager")
            if by == "aot_eager"
            else pfeife.compile(step, capture=door, **OPTIONS)
        )
        ends = [start]
        for more in (0, 8, 16):
            compiled(*larger(batch, more, what)).backward()
            ends.append(time.process_time())
        return dict(zip(CALLS, (after - at for at, after in pairwise(ends)), strict=True))
    if how == "aot_eager":
        torch.compile(step, backend="aot_eager")(*batch).backward()
    elif how == "what-if" or batch[0].is_meta:
        _planned(step, [one[:2] for one in batch], door, phases, cache)
    else:
        pfeife.compile(step, capture=door, **OPTIONS)(*batch).backward()
    found = {"all": time.process_time() - start, "wall": time.perf_counter() - begin}
    for phase, end in phases.ends:
        found[phase], start = end - start, end
    return found


def _planned(
    step: Step, batch: list[torch.Tensor], door: str, phases: _Phases, cache: str | None
) -> None:
    host = machine("h100-sxm")
    flat = pfeife.capture(step, *batch, door=door, cache=cache)
    phases.ends.append(("capture", time.process_time()))
    clusters = pfeife.fuse()(flat)
    phases.ends.append(("fuse", time.process_time()))
    clusters = pfeife.annotate(estimate(clusters, host))(clusters)
    sched.plan(clusters, machine=host, microbatches=4, stages=2)
    phases.ends.append(("plan", time.process_time()))


def measured(name: str, how: str, door: str, cache: str | None = None) -> dict[str, float]:
    """`one` in a process of its own."""
    command = [sys.executable, __file__, "--child", name, how, "--door", door]
    command += ["--cache", cache] if cache else []
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{name} by {how}: {run.stderr}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def first_calls(names: Sequence[str], repeats: int, door: str) -> str:
    """A table of both ways' first calls."""
    rows = []
    for name in names:
        taken: dict[str, list[float]] = {}
        for _ in range(repeats):
            ways = ("pfeife",) if "meta" in name else ("aot_eager", "pfeife")
            for how in ways:
                for what, seconds in measured(name, how, door).items():
                    taken.setdefault(how if what == "all" else what, []).append(seconds)
        medians = {what: statistics.median(each) for what, each in taken.items()}
        shown = [
            f"{medians[what]:.1f} s" if what in medians else "" for what in (*PHASES.values(),)
        ]
        both = medians["pfeife"], medians.get("aot_eager")
        ratio = f"{both[0] / both[1]:.2f}" if both[1] else ""
        theirs = f"{both[1]:.1f} s" if both[1] else ""
        rows.append((name, theirs, f"{both[0]:.1f} s", *shown, ratio))
    return report.table(rows, ("model", "aot_eager", "pfeife", *PHASES.values(), "ratio"))


def shapes(what: str, names: Sequence[str], repeats: int, door: str) -> str:
    """A table of both ways' first calls with three shapes, of which `what` differs."""
    rows = []
    for name in names:
        taken: dict[str, list[dict[str, float]]] = {"aot_eager": [], "pfeife": []}
        for _ in range(repeats):
            for how, each in taken.items():
                each.append(measured(name, f"{what}-{how}", door))
        medians = {
            how: [statistics.median(found[call] for found in each) for call in CALLS]
            for how, each in taken.items()
        }
        cells = [f"{seconds:.2f}" for how in taken for seconds in medians[how]]
        both = [sum(medians[how][:2]) for how in ("pfeife", "aot_eager")]
        rows.append((name, *cells, f"{both[0] / both[1]:.2f}"))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    theirs = [f"aot_eager {call}" for call in CALLS]
    return report.table(rows, ("model", *theirs, *CALLS, "ratio of two"))


def what_ifs(names: Sequence[str], repeats: int, door: str) -> str:
    """A table of plans alone, by what there is of a cache. Raises RuntimeError for a model of which
    nothing was kept, since its second capture would be a first one."""
    rows = []
    shown = ("all", "wall", "capture", "fuse", "plan")
    for name in names:
        taken: dict[str, list[dict[str, float]]] = {"none": [], "empty": [], "filled": []}
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                for state, each in taken.items():
                    cache = None if state == "none" else folder
                    if state == "filled" and not any(Path(folder).glob("captures/*")):
                        raise RuntimeError(f"{name}: nothing was kept of its capture")
                    each.append(measured(name, "what-if", door, cache))
        for state, each in taken.items():
            medians = [statistics.median(found[what] for found in each) for what in shown]
            rows.append((name, state, *(f"{seconds:.1f} s" for seconds in medians)))
    return report.table(rows, ("model", "cache", *shown))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--only", default="", help="models with this in their names")
    arguments.add_argument("--door", default="auto", choices=("auto", "dynamo", "trace"))
    arguments.add_argument(
        "--shapes",
        nargs="?",
        const="lengths",
        choices=("lengths", "rows"),
        help="three calls, of which this is another one in each",
    )
    arguments.add_argument("--what-if", action="store_true", help="plans, with and without a cache")
    arguments.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments.add_argument("--cache", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.child:
        print(json.dumps(one(*given.child, given.door, given.cache)))
        return
    known, table = MODELS, first_calls
    if given.what_if:
        known, table = WHAT_IF, what_ifs
    elif given.shapes:
        known, table = SHAPES, functools.partial(shapes, given.shapes)
    print(table([name for name in known if given.only in name], given.repeats, given.door))


if __name__ == "__main__":
    main()
