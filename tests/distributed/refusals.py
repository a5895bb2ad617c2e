"""What one rank cannot do, none does."""

import copy
import shutil

import attrs
import torch
import torch.distributed as dist
from models import case
from rows import row
from torch import fx, nn

import pfeife
from pfeife import sched
from pfeife.cost import machine
from pfeife.runtime.distributed.process_group import join_world
from pfeife.testing import own_gradients

CPU_CORE = machine("cpu-core")


@row(ranks=(2,))
def a_refusal_on_one_rank() -> None:
    """What rank 0 decides holds: if it refuses, all do."""

    def refuse() -> str:
        raise ValueError("no plan")

    world = join_world(torch.device("cpu"))
    try:
        world.decided_by_rank_zero(refuse)
    except ValueError as error:
        assert str(error) == "no plan"
    else:
        raise AssertionError("rank 0's refusal was lost")
    assert world.decided_by_rank_zero(lambda: "plan") == "plan"


@row(ranks=(2,))
def texts_of_all_ranks() -> None:
    """Also where one has nothing to say, and of other lengths."""
    world = join_world(torch.device("cpu"))
    for mine in ("", "what rank 1 says: é"):
        found = world.from_all_ranks(mine if world.rank else "from rank 0")
        assert found == ["from rank 0", mine], found


@row(ranks=(2,))
def refusals() -> None:
    """Wrong requests end on every rank, before anything is sent."""
    one = case("UNet")
    for options, message in (
        ({"stages": 1}, "every rank needs a stage"),
        ({"microbatches": 3}, "does not divide"),
    ):
        torch._dynamo.reset()
        try:
            pfeife.compile(one.step, **options)(*one.batch(4))
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{options} was not refused")
    torch._dynamo.reset()
    stages_of_one_rank = pfeife.compile(one.step, microbatches=2, replicas=2, stages=2)
    torch.testing.assert_close(stages_of_one_rank(*one.batch(4)), one.step(*one.batch(4)))
    torch._dynamo.reset()
    try:
        pfeife.compile(one.step, microbatches=2)(*one.batch(4, seed=dist.get_rank()))
    except ValueError as error:
        assert "given the whole batch" in str(error)
    else:
        raise AssertionError("ranks with other rows were not refused")
    torch._dynamo.reset()
    rows = 4 if dist.get_rank() == 0 else 8
    try:
        pfeife.compile(one.step, microbatches=2)(*one.batch(rows))
    except ValueError as error:
        assert "another one than rank 0" in str(error)
    else:
        raise AssertionError("ranks with other batches were not refused")


@row(ranks=(2,), whole=(2,))
def compilers() -> None:
    """Every rank compiles its own stages, by Inductor; if one cannot, all refuse."""
    if shutil.which("g++"):
        one = case("DropoutNet")
        for compiler in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            step = pfeife.compile(one.step, microbatches=2, compiler=compiler)
            torch.manual_seed(0)  # of the draws
            loss = step(*one.batch(4))
            loss.backward()
            found = own_gradients(one.model)
            if compiler == "aot_eager":
                expected = {"loss": loss.detach()} | {n: g.clone() for n, g in found.items()}
            one.model.zero_grad()
        for name, value in expected.items():
            torch.testing.assert_close(value, (found | {"loss": loss.detach()})[name])

    def fails_on_one(graph, examples):
        if dist.get_rank() == 1:
            raise RuntimeError("no lowering")
        return graph

    torch._dynamo.reset()
    one = case("UNet")
    try:
        pfeife.compile(one.step, microbatches=2, compiler=fails_on_one)(*one.batch(4))
    except ValueError as error:
        assert str(error).startswith("rank 1: compiler=") and "no lowering" in str(error)
    else:
        raise AssertionError("a rank without compiled stages went on")


def other_on_rank_one(program: pfeife.Program) -> pfeife.Program:
    """A pass that makes another program on rank 1."""
    module = fx.GraphModule(program.module, copy.deepcopy(program.module.graph))
    if dist.get_rank() == 1:
        first = next(iter(module.graph.nodes))
        with module.graph.inserting_after(first):
            other = module.graph.call_function(torch.ops.aten.neg.default, (first,))
        first.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    return attrs.evolve(program, module=module)


@row(ranks=(2,))
def decisions_that_differ() -> None:
    """Ranks that were given other schedules, or whose passes make other programs, stop before
    anything is sent; the same ones run."""
    orders = sched.families.gpipe(2, 2), sched.families.one_f_one_b(2, 2)
    world = join_world(torch.device("cpu"))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)

    def step(x):
        return model(x).square().mean()

    for options, message in (
        ({"schedule": orders[world.rank]}, "schedule=Schedule "),
        ({"passes": {"flat": [other_on_rank_one]}}, "the program: ranks [1] have another"),
        ({"passes": {"ranks": [other_on_rank_one]}}, "the passes made: ranks [1] have another"),
    ):
        torch._dynamo.reset()
        try:
            pfeife.compile(step, microbatches=2, **options)(x)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{options} was not refused")
    torch._dynamo.reset()
    same = {"schedule": orders[1], "passes": {"ranks": [pfeife.compose()]}}
    expected = sum(step(part) / 2 for part in x.chunk(2))
    assert torch.equal(pfeife.compile(step, microbatches=2, **same)(x), expected)
