"""Cuts at the borders of blocks, by the modules that a program was captured in."""

import pytest
import torch
from programs import CPU_CORE
from torch import nn

import pfeife
from pfeife.cost import estimate
from pfeife.sched import plan
from pfeife.sched.cutting import blocks_of
from pfeife.sched.cutting.partitions import module_stack


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.parts = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(2))
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        hidden = self.inner(self.norm(x)).relu()
        for part in self.parts:
            hidden = part(hidden)
        return x + self.outer(hidden)


class Net(nn.Module):
    def __init__(self, blocks: int = 4):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.mixed = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        for module in self.mixed:
            x = module(x)
        return self.head(x).square().mean()


def clusters_of(model: nn.Module, *inputs: torch.Tensor) -> pfeife.Program:
    clusters = pfeife.fuse()(pfeife.capture(lambda *x: model(*x), *inputs))
    return pfeife.annotate(estimate(clusters, CPU_CORE))(clusters)


@pytest.fixture(scope="module")
def clusters() -> pfeife.Program:
    return clusters_of(Net(), torch.arange(6))


def stages_by_block(program: pfeife.Program, stage_of: tuple[int, ...]) -> dict[str, set[int]]:
    """The stages in which each block computes."""
    found: dict[str, set[int]] = {}
    for call in program.calls:
        nodes = [n for n in program.body(call).graph.nodes if n.op == "call_function"]
        nodes = nodes if call.kind == pfeife.Kind.FORWARD else []
        for path in {path for node in nodes for path, _ in module_stack(node)}:
            found.setdefault(path, set()).add(stage_of[call.unit])
    return {block: found[block] for block in blocks_of(program)}


def test_blocks_are_the_outermost_elements_that_are_alike(clusters):
    assert blocks_of(clusters) == tuple(f"layers.{at}" for at in range(4))


X = torch.ones(2, 4)


class Loss(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "search"])
def test_no_block_is_torn(clusters, stages, schedule):
    if schedule == "search" and stages != 3:
        return
    made = plan(
        clusters,
        machine=CPU_CORE,
        microbatches=4,
        stages=stages,
        schedule=schedule,
        cut_at="blocks",
        search_work=30_000,
    )
    assert made.stages == stages
    torn = stages_by_block(clusters, made.stage_of_cluster)
    assert len(torn) == 4 and all(len(mine) == 1 for mine in torn.values())


def test_modules_by_name(clusters):
    made = plan(
        clusters, machine=CPU_CORE, microbatches=4, stages=2, cut_at=["layers.3", "mixed.0"]
    )
    torn = stages_by_block(clusters, made.stage_of_cluster)
    assert torn["layers.2"] == {0} and len(torn["layers.3"]) == 1


@pytest.mark.parametrize(
    ("cut_at", "stages", "error"),
    [
        ("blocks", 7, r"7 stages, and between clusters there are 5 borders of the 4 modules"),
        (["layers.9"], 2, "no module 'layers.9' computes anything; there are"),
        ("block", 2, "cut_at='block': must be 'anywhere', 'blocks', or a list of modules"),
        ([], 2, "must be 'anywhere', 'blocks', or a list"),
    ],
)
def test_what_cannot_be(clusters, cut_at, stages, error):
    with pytest.raises(ValueError, match=error):
        plan(clusters, machine=CPU_CORE, microbatches=4, stages=stages, cut_at=cut_at)


def test_a_model_without_blocks():
    program = clusters_of(Loss(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), X)
    alone = clusters_of(Loss(nn.Linear(4, 4), nn.LayerNorm(4)), X)
    assert blocks_of(program) == ("0", "2") and blocks_of(alone) == ()
    with pytest.raises(ValueError, match="the model has no repeated blocks"):
        plan(alone, machine=CPU_CORE, microbatches=2, stages=2, cut_at="blocks")


def test_as_options():
    model, tokens = Net(3), torch.arange(8)
    step = pfeife.compile(lambda t: model(t), microbatches=2, stages=3, cut_at="blocks")
    expected = torch.stack([model(half) for half in tokens.chunk(2)]).mean()
    assert step(tokens).item() == pytest.approx(expected.item())
    compiled = step.backend.compiled[0]
    torn = stages_by_block(compiled.clusters, compiled.plan.stage_of_cluster)
    assert sorted(map(len, torn.values())) == [1, 1, 1]
    for options, error in (
        ({"cut_at": "blocks", "partition": "uniform"}, "options cut_at='blocks' and partition"),
        ({"cut_at": 3}, "option cut_at=3: must be 'anywhere'"),
        ({"message_tolerance": 2}, "option message_tolerance=2: must be from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=error):
            pfeife.backend(**options)
