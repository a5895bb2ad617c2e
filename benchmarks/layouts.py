"""Other people's models on groups of ranks: members, stages and replicas, by several schedules.

    python benchmarks/layouts.py                              all of it (some hours on 2 cores)
    python benchmarks/layouts.py --only mixtral --ranks 4     a part of it
    python benchmarks/layouts.py --json rows.json

For each model, layout and schedule two things are shown. `oracle`: a step's loss and gradients are
those of `pfeife.evaluate` of the same program, bit for bit. `training`: three steps with AdamW and
clipping by `pfeife.compile(step, members=..., ...)`, beside plain torch on one device that
accumulates gradients over the same microbatches: the largest difference of losses and norms, and of
parameters in units of the largest of their tensor, in float64. Some models compute a loss or norms
in float32 whatever they are given; the table says which. Exits non-zero if bits differ, or numbers
by more than LIMITS.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import coverage_case
import coverage_models
import harness
import torch
import torch.distributed as dist
from coverage_models.example import Example
from differences import largest
from torch import nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine, member_prices, timing_of
from pfeife.data.replicas import DataParallel
from pfeife.ir.nodes import node_bytes
from pfeife.ir.program import Program
from pfeife.passes.member_ways import Prices
from pfeife.passes.shard import Attention
from pfeife.runtime.distributed.pipeline import DistributedPipeline

MODELS = {
    "gpt2": "text_decoders",
    "llama": "text_decoders",
    "t5": "encoder_decoders",
    "vit": "vision",
    "mixtral": "experts",
    "deepseek_v2": "experts",
    "deepseek_v3": "experts",
    "unet_condition": "generative",
    "smp_unet": "dense",
}
MICROBATCHES, STEPS, RATE, SECONDS = 4, 3, 1e-3, 7200.0
LIMITS = {"float64": 1e-12, "float32": 1e-6}
CPU_CORE = machine("cpu-core")
# Models are so small here that a machine would gather the matrices of experts.
ROWS_ARE_SENT = Prices(
    compute=lambda node: float(node_bytes(node) + 1),
    send=lambda size: 1e-3 * size,
    copy=lambda size: 1e-3 * size,
)


# What is cut over the members, besides what follows: all matrices that can be, where the linear
# program finds it best; the experts; or nothing but the batch, of which a microbatch is one row, so
# that it is cut along the sequence (context parallelism; in a ring keys and values go around).
# Replicas without members share out
# gradients and optimizer state (fsdp).
KINDS: dict[str, Any] = {"tp": "cut", "ep": {"*.experts.*": 0}, "cp": {}, "ring": {}, "fsdp": None}


@attrs.frozen
class Layout:
    """`members` of each of so many stages, of each of so many pipelines."""

    members: int
    stages: int = 1
    replicas: int = 1
    kind: str = "tp"

    @property
    def ranks(self) -> int:
        return self.members * self.stages * self.replicas

    def __str__(self) -> str:
        return f"{self.kind} {self.members}, pp {self.stages}, dp {self.replicas}"

    def fits(self, name: str) -> bool:
        """Whether a model is cut so: one with experts, or one of texts."""
        group = MODELS[name]
        of_texts = group == "experts" or "decoders" in group
        only = {"ep": group == "experts", "cp": of_texts, "ring": of_texts}
        return only.get(self.kind, True)

    @property
    def attention(self) -> Attention:
        """How members read keys and values of a sequence that is cut."""
        return "ring" if self.kind == "ring" else "gather"

    @property
    def shared_out(self) -> DataParallel:
        """What replicas do with gradients."""
        return "shard" if self.kind == "fsdp" else "average"


LAYOUTS = (
    *(Layout(2), Layout(4), Layout(8)),
    *(Layout(2, 2), Layout(2, 4), Layout(4, 2)),
    *(Layout(2, 1, 2), Layout(2, 2, 2)),
    *(Layout(2, 2, kind="ep"), Layout(4, 2, kind="ep")),
    *(Layout(2, 2, kind="cp"), Layout(4, 2, kind="cp")),
    *(Layout(2, 2, kind="ring"), Layout(4, 2, kind="ring")),
    *(Layout(1, 2, 2, kind="fsdp"), Layout(1, 2, 4, kind="fsdp")),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")


def drawn(name: str, layout: Layout) -> tuple[Example, list[tuple[Any, ...]]]:
    """A model without dropouts, and its batches: in float64, but for grouped products of experts,
    which torch does not have in that."""
    example = coverage_case.built(coverage_models.models(MODELS[name])[name])
    grouped = layout.kind == "ep"
    dtype = torch.float32 if grouped else torch.float64
    example.model.to(dtype)
    if hasattr(example.model, "set_experts_implementation"):
        example.model.set_experts_implementation("grouped_mm" if grouped else "batched_mm")

    rows, batches = 1 if layout.kind in ("cp", "ring") else example.rows, []
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        batch = example.draw(rows * MICROBATCHES, example.sizes[0])
        batches.append(coverage_case.in_dtype(batch, dtype))
    return example, batches


@functools.cache
def captured(name: str, kind: str) -> Program:
    """A microbatch of a model, of which schedules and layouts of one kind have the same."""
    example, batches = drawn(name, Layout(1, kind=kind))
    return pfeife.capture(example.step, *coverage_case.cut(example, batches[0], MICROBATCHES)[0])


def as_the_oracle(name: str, layout: Layout, schedule: str) -> bool:
    """Whether a step on ranks has the bits of `evaluate`."""
    example, batches = drawn(name, layout)
    microbatches = coverage_case.cut(example, batches[0], MICROBATCHES)
    flat = captured(name, layout.kind)
    if layout.members > 1:
        prices = ROWS_ARE_SENT if layout.kind == "ep" else member_prices(CPU_CORE)
        flat = pfeife.shard(
            KINDS[layout.kind],
            layout.members,
            unknown="gather",
            attention=layout.attention,
            prices=prices,
        )(flat)
    local = pfeife.compose(pfeife.fuse(), pfeife.split_backward())(flat)
    local = pfeife.annotate(estimate(local, CPU_CORE))(local)
    plan = sched.plan(
        local,
        machine=CPU_CORE,
        microbatches=MICROBATCHES // layout.replicas,
        stages=layout.stages * (2 if schedule in ("interleaved", "zb-v") else 1),
        ranks=layout.stages,
        schedule=schedule,
    )
    replicas = pfeife.Replicas(layout.replicas, layout.shared_out)
    wrapped = pfeife.dp_wrap(pfeife.Mesh(layout.stages, layout.replicas), replicas)
    beside = pfeife.overlap(timing_of(CPU_CORE))
    ranks = pfeife.compose(pfeife.apply(plan), wrapped, beside)(local)
    lowered = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    state = pfeife.state_of(ranks, example.model)
    expected = pfeife.evaluate(ranks, state, microbatches, seed=3)
    mesh = pfeife.Mesh(layout.stages, layout.replicas, members=layout.members)
    pipeline = DistributedPipeline(ranks, lowered, mesh=mesh)
    member = pipeline.mesh.member
    result = pipeline(pfeife.state_of(ranks, example.model, member=member), microbatches, seed=3)
    splits = {port.fqn: port.split for port in ranks.ports(pfeife.Role.GRADIENT)}

    def own(gradient: str) -> torch.Tensor:
        whole, split = expected.gradients[gradient], splits[gradient]
        return split.parts(whole)[member] if split else whole

    same = [torch.equal(value, own(key)) for key, value in result.gradients.items()]
    return all(same) and bool(same) and torch.equal(result.loss, expected.loss)


def trained(example: Example, losses: Any, batches: Sequence[tuple[Any, ...]]) -> list[float]:
    """Losses and norms of some steps."""
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=RATE)
    numbers = []
    for batch in batches:
        optimizer.zero_grad()
        numbers.append(losses(batch))
        numbers.append(float(torch.nn.utils.clip_grad_norm_(example.model.parameters(), 0.5)))
        optimizer.step()
    return numbers


def statistics_of(model: nn.Module) -> set[str]:
    """The names of those of batch norms, which replicas do not share (docs/guarantees.md)."""
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    return {f"{name}.{key}" for name, norm in norms for key, _ in norm.named_buffers()}


def beside_one_device(name: str, layout: Layout, schedule: str, cache: Path) -> tuple[float, str]:
    """The largest difference, and the narrowest type of what is computed."""
    example, batches = drawn(name, layout)
    plain, _ = drawn(name, layout)
    cut = KINDS[layout.kind]
    step = pfeife.compile(
        example.step,
        in_dims=example.in_dims,
        microbatches=MICROBATCHES,
        **({"members": layout.members, "parallel": cut} if layout.members > 1 else {}),
        replicas=layout.replicas,
        data_parallel=layout.shared_out,
        attention=layout.attention,
        schedule=schedule,
        loss_reduction="mean",
        progress=False,
        cache=cache,
    )

    def piped(batch: tuple[Any, ...]) -> float:
        loss = step(*batch)
        loss.backward()
        return float(loss.detach())

    def alone(batch: tuple[Any, ...]) -> float:
        total = 0.0
        for microbatch in coverage_case.cut(plain, batch, MICROBATCHES):
            loss = plain.step(*microbatch) / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        return total

    numbers, expected = trained(example, piped, batches), trained(plain, alone, batches)
    gaps = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(numbers, expected, strict=True)]
    state = pfeife.full_state_dict(example.model)
    others = statistics_of(plain.model) if layout.replicas > 1 else set()
    for key, value in plain.model.state_dict().items():
        if key not in others and value.is_floating_point() and value.numel():
            gap = float((state[key] - value).abs().max())
            # What has no gradient but noise moves by some of the optimizer's steps.
            gaps.append(gap / max(float(value.abs().max()), STEPS * RATE))
    nodes = step.backend.compiled[0].captured.program.module.graph.nodes
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return largest(gaps), "float32" if torch.float32 in dtypes else "float64"


def on_this_rank(name: str, layouts: Sequence[Layout], out: Path) -> None:
    """Writes a line of JSON a row."""
    cases = [
        (layout, schedule)
        for layout in layouts
        for schedule in (SCHEDULES if layout.stages > 1 else SCHEDULES[:1])
    ]
    for layout, schedule in cases:
        row: dict[str, Any] = {"model": name, "layout": str(layout), "schedule": schedule}
        torch._dynamo.reset()
        try:
            row["oracle"] = as_the_oracle(name, layout, schedule)
            row["training"], row["dtype"] = beside_one_device(
                name, layout, schedule, out.with_name("cache")
            )
        except (ValueError, pfeife.PipelineError) as error:
            row["refused"] = str(error)[:600]
        if not dist.get_rank():
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def launched(name: str, layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    """The rows of a model in layouts of as many ranks, of which one that ends in no way foreseen
    ends all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows")
        out.touch()
        said = json.dumps([attrs.asdict(layout) for layout in layouts])
        failed: list[dict[str, Any]] = []
        try:
            words = ["--only", name, "--layouts", said, "--out", str(out)]
            harness.world(__file__, layouts[0].ranks, words, SECONDS)
        except RuntimeError as error:
            failed = [{"model": name, "oracle": str(error)[:600]}]
        return [json.loads(line) for line in out.read_text().splitlines()] + failed


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether bits or numbers are others than they have to be, or the ranks have failed."""
    if "refused" in row:
        return False
    return row["oracle"] is not True or not row["training"] <= LIMITS[row["dtype"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=MODELS, help="a model")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--kind", action="append", choices=KINDS, help="what is cut")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--layouts", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.only or list(MODELS)
    if asked.layouts:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        layouts = [Layout(**layout) for layout in json.loads(asked.layouts)]
        on_this_rank(names[0], layouts, asked.out)
        dist.destroy_process_group()
        return
    sizes = [int(size) for size in asked.ranks.split(",")]
    kinds = asked.kind or KINDS
    todo = [
        (name, [of for of in LAYOUTS if of.ranks == ranks and of.fits(name) and of.kind in kinds])
        for name in names
        for ranks in sizes
    ]
    rows: list[dict[str, Any]] = []
    for name, layouts in tqdm([case for case in todo if case[1]], disable=None):
        rows += launched(name, layouts)
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=1))
    columns = ("model", "layout", "schedule", "oracle", "training", "dtype", "refused")
    lines = [[str(row.get(column, ""))[:80] for column in columns] for row in rows]
    tqdm.write(report.table(lines, columns))
    wrong = [row for row in rows if is_wrong(row)]
    tqdm.write(f"{len(rows)} rows, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
