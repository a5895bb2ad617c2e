"""A limit of memory: one rule in the planner and in a compiled step, by the account of bytes."""

import attrs
import torch
from rows import row
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine, memory_curves
from pfeife.testing import eager_accumulation

CORE = machine("cpu-core")
WIDTH = 64
LAYERS = 6


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def _step(model):
    return lambda x: model(x).square().mean()


def _batch(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def _clusters(split: bool = False, train: bool = True, rows: int = 16) -> pfeife.Program:
    with torch.set_grad_enabled(train):
        program = pfeife.capture(_step(_model()), _batch(rows))
    fused = pfeife.fuse()(program)
    fused = pfeife.split_backward()(fused) if split else fused
    return pfeife.annotate(estimate(fused, CORE))(fused)


def _peak(program: pfeife.Program, plan: pfeife.Plan) -> int:
    """Bytes of the worst rank, by the account."""
    passes = [pfeife.partition(plan), pfeife.insert_send_recv()]
    if plan.recompute:  # partition wants backwards that are not split yet
        program = pfeife.fuse()(pfeife.capture(_step(_model()), _batch(16)))
        passes.insert(1, pfeife.split_backward())
    ranks = pfeife.compose(*passes)(program)
    curves = memory_curves(ranks, sched.lower(plan.schedule, ranks))
    return max(curve.peak for curve in curves)


def _planned(program: pfeife.Program, **options) -> pfeife.Plan:
    given = {"machine": CORE, "microbatches": 4, "ranks": 2, **options}
    return sched.plan(program, **given)


@row("memory_limit=")
def a_family_keeps_to_the_limit():
    """The even cut, which is the fastest, needs the least too."""
    program = _clusters()
    free = _planned(program, stages=2)
    limit = int(0.95 * _peak(program, free))
    plan = _planned(program, stages=2, memory_limit=limit)
    assert _peak(program, plan) <= limit, "a plan over its limit came back"


@row()
def cuts_by_hand_at_the_limit():
    program, cuts, most = _cut_by_hand()
    assert _planned(program, cuts=cuts, memory_limit=most).stage_of_cluster == cuts


@row("memory_limit=")
def cuts_by_hand_over_the_limit():
    program, cuts, most = _cut_by_hand()
    _planned(program, cuts=cuts, memory_limit=most - 1)


def _cut_by_hand() -> tuple[pfeife.Program, tuple[int, ...], int]:
    """The last cluster alone in its stage, and the bytes of the worst rank."""
    program = _clusters()
    last = program.units - 1
    cuts = tuple(int(unit == last) for unit in range(program.units))
    return program, cuts, _peak(program, _planned(program, cuts=cuts))


@row()
def a_search_keeps_to_the_limit():
    program, search = _clusters(split=True), {"schedule": "search", "search_work": 20_000}
    limit = int(0.93 * _peak(program, _planned(program, **search)))
    assert _peak(program, _planned(program, **search, memory_limit=limit)) <= limit


@row(whole=(1,))
def a_search_at_the_limit():
    program, search, least = _searched()
    assert _peak(program, _planned(program, **search, memory_limit=least)) == least < 185_000


@row("memory_limit=", whole=(1,))
def a_search_below_the_limit():
    """By a byte: the same operations are looked at each time."""
    program, search, least = _searched()
    _planned(program, **search, memory_limit=least - 1)


def _searched() -> tuple[pfeife.Program, dict, int]:
    """A search, and the bytes of the worst rank of what it finds where memory is short."""
    program, search = _clusters(split=True), {"schedule": "search", "search_work": 20_000}
    return program, search, _peak(program, _planned(program, **search, memory_limit=185_000))


@row("memory_limit=")
def a_refusal_says_what_the_worst_rank_needs():
    program = _clusters()
    try:
        _planned(program, stages=2, memory_limit=150_000, optimizer="adamw")
    except ValueError as error:
        words = ("parameters", "gradients", "optimizer", "activations", "use more stages")
        assert all(word in str(error) for word in words), error
        raise


@row()
def what_fits_by_the_byte_is_not_refused():
    """An evaluation holds no gradients, so that parameters count once."""
    program = _clusters(train=False, rows=2)
    most = _peak(program, _planned(program, stages=2))
    plan = _planned(program, stages=2, memory_limit=most)
    assert _peak(program, plan) <= most


SMALL = attrs.evolve(CORE, memory=200_000)  # the best plan needs a little more
TOO_SMALL = "the 195.3 KiB of machine cpu-core: the best plan found needs"


@row(TOO_SMALL)
def the_machine_is_a_limit_too():
    _planned(_clusters(), stages=2, machine=SMALL)


@row(TOO_SMALL, ranks=(1, 2))
def the_machine_is_a_limit_of_a_compiled_step():
    pfeife.compile(_step(_model()), microbatches=4, stages=2, machine=SMALL)(_batch())


def _limited(limit: int, optimizer, model=None):
    return pfeife.compile(
        _step(model or _model()),
        microbatches=4,
        stages=2,
        memory_limit=limit,
        optimizer=optimizer,
    )


# Without an optimizer the worst rank of this step needs a little less.
ENOUGH = 266_000


@row(ranks=(1, 2))
def a_limit_without_an_optimizer():
    model, x = _model(), _batch()
    expected = eager_accumulation(_step(model), model, [(part,) for part in x.chunk(4)])
    assert torch.equal(_limited(ENOUGH, 0, model)(x), expected.loss)


@row(f"memory_limit={ENOUGH}: the best plan found needs", ranks=(1, 2))
def the_state_of_adam_counts():
    _limited(ENOUGH, "adamw")(_batch())


@row(f"memory_limit={ENOUGH}: the best plan found needs", ranks=(1, 2))
def the_state_of_an_optimizer_at_hand_counts():
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    _limited(ENOUGH, optimizer, model)(_batch())


@row(f"memory_limit={ENOUGH}: the best plan found needs", ranks=(1, 2))
def master_weights_count():
    _limited(ENOUGH, 4 + 8)(_batch())


@row(ranks=(1, 2))
def frozen_parameters_have_no_state():
    model, x = _model(), _batch()
    for layer in model[:-1]:
        layer.requires_grad_(False)
    expected = eager_accumulation(_step(model), model, [(part,) for part in x.chunk(4)])
    assert torch.equal(_limited(121_000, "adamw", model)(x), expected.loss)


@row("option optimizer='adamv'")
def an_optimizer_that_is_none():
    _limited(ENOUGH, "adamv")


@row("optimizer=LBFGS: what it keeps")
def an_optimizer_whose_state_is_not_seen():
    _limited(ENOUGH, torch.optim.LBFGS)(_batch())


@row("memory_limit=")
def replicas_reduce_within_the_limit():
    program = _clusters(rows=1)
    last = program.units - 1
    given = {"cuts": tuple(int(unit == last) for unit in range(program.units)), "microbatches": 1}
    alone = _planned(program, **given)
    _planned(program, **given, replicas=2, memory_limit=_peak(program, alone))
