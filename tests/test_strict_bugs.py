"""What hangs with NCCL, each put in on purpose: the model names it."""

import attrs
import pytest
import torch
from seeded import seed
from strict.circle import Stuck
from strict.cuda import host_here
from strict.gpu import Half, Machine, Mismatch
from strict.group import Communicators, Group
from strict.host import Host, Pace, run_hosts
from strict.programs import Case, on_ranks, skipping
from strict.ranks import beside, kernels, on_strict_ranks, steps_of

import pfeife
from pfeife.lowering import envelope
from pfeife.runtime.distributed.links import reducing, warm_up
from pfeife.runtime.distributed.world import batch_norms
from pfeife.runtime.interpret import RankRunner
from pfeife.sched import families
from pfeife.testing import assert_same


def tensor(elements: int = 1) -> torch.Tensor:
    return torch.zeros(elements)


def on_two(*jobs, pace=Pace.AHEAD, queues=None):
    """Two ranks that each do a job with their ends of one group."""
    machine, shared = Machine(queues), Communicators("two", (0, 1))
    hosts = [Host(machine, rank, pace) for rank in range(2)]
    groups = [Group(shared, host) for host in hosts]
    return run_hosts(
        machine, hosts, [lambda j=job, g=one: j(g) for job, one in zip(jobs, groups, strict=True)]
    )


def both_send_first(group):
    other = 1 - group.host.rank
    group.send([tensor()], other, 0).wait()
    group.recv([tensor()], other, 0).wait()


@pytest.mark.parametrize("pace", Pace)
def test_both_send_first(pace):
    """Whether hosts wait or streams do; a group of both is well."""
    with pytest.raises(Stuck, match=r"rank 0 .*a send to rank 1 .*rank 1 .*a send to rank 0 .*cir"):
        on_two(both_send_first, both_send_first, pace=pace)

    def together(group):
        other = 1 - group.host.rank
        group.grouped([Half(True, other, tensor()), Half(False, other, tensor())]).wait()

    on_two(together, together, pace=pace)


def test_a_collective_between_two_sends_on_one_rank():
    """Over one stream. (Messages of torch's groups have one apart, but if the stream waits.)"""

    def between(group):
        group.send([tensor()], 1, 0).wait()
        group.broadcast(tensor(), 0).wait()
        group.send([tensor()], 1, 0).wait()

    def after(group):
        group.recv([tensor()], 0, 0).wait()
        group.recv([tensor()], 0, 0).wait()
        group.broadcast(tensor(), 0).wait()

    with pytest.raises(Stuck, match=r"a broadcast .*in a circle"):
        on_two(between, after)


def test_other_collectives():
    with pytest.raises(Mismatch, match=r"rank 0 at .*: a broadcast of 4 .*rank 1 at .* of 8 bytes"):
        on_two(
            lambda g: g.broadcast(tensor(), 0).wait(), lambda g: g.broadcast(tensor(2), 0).wait()
        )


def test_a_send_that_nobody_receives():
    with pytest.raises(Stuck, match=r"a send to rank 1 .* waits for rank 1, which has ended"):
        on_two(
            lambda g: [g.send([tensor()], 1, 0) for _ in range(2)],
            lambda g: g.recv([tensor()], 0, 0),
        )


def moved(schedule: pfeife.Schedule, rank: int, action: str, beside: str) -> pfeife.Schedule:
    """An action of a rank, at the place of another one."""
    ranks = [list(actions) for actions in schedule.ranks]
    names = [str(one) for one in ranks[rank]]
    ranks[rank].insert(names.index(beside), ranks[rank].pop(names.index(action)))
    return pfeife.Schedule(tuple(map(tuple, ranks)))


@pytest.mark.parametrize(
    ("rank", "action", "beside"), [(0, "0SEND_F0", "0SEND_F1"), (1, "1RECV_F1", "1RECV_F0")]
)
def test_two_sends_or_receives_of_one_size_in_another_order(rank, action, beside):
    """The check of the schedule says so; NCCL does not, and the numbers are others."""
    program, lowered = on_ranks(families.gpipe(2, 2), overlap=False)
    wrong = moved(lowered, rank, action, beside)
    with pytest.raises(ValueError, match=r"rank 1 expects 1RECV_F. from rank 0, which sends 1RECV"):
        pfeife.sched.verify_schedule(wrong)
    _, state, batches = skipping(microbatches=2)
    whole = pfeife.evaluate(program, state, batches)
    found = on_strict_ranks(program, wrong, steps_of(state, batches), pace=Pace.COMPUTING)[0]
    mine = {name: whole.gradients[name] for name in found.gradients}
    with pytest.raises(AssertionError, match="differs"):
        assert_same(attrs.evolve(whole, gradients=mine), found, ("layers.1.weight",))


@pytest.mark.parametrize(
    ("rank", "action", "beside"), [(0, "0SEND_F1", "2SEND_F0"), (1, "3RECV_F0", "1RECV_F1")]
)
def test_two_sends_or_receives_of_other_sizes_in_another_order(rank, action, beside):
    """Two stages of rank 0 send to rank 1, the first of them two values."""
    program, lowered = on_ranks(families.interleaved(4, 2, (0, 1, 0, 1)))
    wrong = moved(lowered, rank, action, beside)
    _, state, batches = skipping(microbatches=2)
    with pytest.raises(Mismatch, match=r"rank . at .*rank . at .* are not of one size"):
        on_strict_ranks(program, wrong, steps_of(state, batches), pace=Pace.KEPT)


def on_tied_ranks(**options):
    """The last stage's rank reduces a tied weight before what the first one waits for."""
    program, lowered = on_ranks(families.interleaved(4, 4, (0, 1, 0, 1)))
    _, state, batches = skipping(microbatches=4)
    return on_strict_ranks(program, lowered, steps_of(state, batches), **options)


def test_connecting_in_a_step(monkeypatch):
    """What NCCL connects with the first operation of a kind keeps a host from posting what the
    other one's needs, if that is kept by its GPU."""
    on_tied_ranks(pace=Pace.KEPT)
    monkeypatch.delitem(warm_up._USES, warm_up.REDUCE)
    with pytest.raises(Stuck, match=r"REDUCE_GRAD .*: its host connects reduce .*in a circle"):
        on_tied_ranks(pace=Pace.KEPT)


@pytest.mark.parametrize("queues", [1, 2, 4])
def test_fewer_hardware_queues_than_streams(queues):
    """What waits for a message keeps all that was posted to its queue after it. So it is refused,
    whoever sets it: Megatron has CUDA_DEVICE_MAX_CONNECTIONS=1."""
    on_tied_ranks(queues=16)
    with pytest.raises(Stuck, match=r"in a circle"):
        on_tied_ranks(queues=queues, told=32)
    with pytest.raises(ValueError, match=rf"streams of a rank share {queues} hardware queues"):
        on_tied_ranks(queues=queues)


def test_hosts_that_wait_for_what_they_launch(monkeypatch):
    """CUDA_LAUNCH_BLOCKING=1: a rank posts a receive before the other one can send."""
    with pytest.raises(Stuck, match=r"waits for the kernel that it has launched.*in a circle"):
        on_tied_ranks(blocks=True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match=r"CUDA_LAUNCH_BLOCKING=1 keeps a rank .*: unset it"):
        on_tied_ranks(blocks=True)


def test_sparse_gradients():
    """NCCL has no sums of them; a step would only end in the middle."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(6, 4, sparse=True), torch.nn.Linear(4, 4))
    batches = [(torch.tensor([0, index]),) for index in range(2)]
    program = pfeife.fuse()(pfeife.capture(lambda x: net(x).square().mean(), *batches[0]))
    plan = pfeife.Plan((0,) * (1 + max(call.unit for call in program.calls)), families.gpipe(1, 1))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.dp_wrap(pfeife.Mesh(1, 2)))(program)
    lowered = pfeife.sched.lower(plan.schedule, sent)
    with pytest.raises(ValueError, match=r"gradient of '0.weight' is sparse, .* sparse=False"):
        on_strict_ranks(sent, lowered, steps_of(pfeife.state_of(program, net), batches))


def reduced(pace=Pace.COMPUTING, case=Case.TRAINING, job=steps_of, **made):
    """A step of two replicas, whose numbers are those of one device."""
    schedule = families.gpipe(4, 2, (0, 1, 2, 0))
    program, lowered = on_ranks(schedule, 2, case=case, overlap=False, **made)
    _, state, batches = skipping(case, microbatches=4)
    found = on_strict_ranks(program, lowered, job(state, batches), pace=pace)
    whole = pfeife.evaluate(program, state, batches)
    for one in found:
        mine = {name: whole.gradients[name] for name in one.gradients}
        theirs = attrs.evolve(whole, gradients=mine, buffers=one.buffers)
        assert_same(theirs, one, ("layers.1.weight",))


@pytest.mark.parametrize(
    ("module", "right", "wrong", "made"),
    [
        (
            reducing,
            "[bucket.share(*place) for place in self._places]",
            "[bucket.share(*place) for place in self._places][::-1]",
            {"shard": True},
        ),
        (
            batch_norms,
            "max(sizes.values()) * len(result.statistics) - len(message)",
            "0",
            {"case": Case.NORMED},
        ),
        (
            envelope,
            "[*first, *Envelope(layouts).pack(announced)]",
            "[*Envelope(layouts).pack(announced), *first]",
            {"case": Case.SIZED},
        ),
    ],
    ids=["shards the other way round", "statistics as each rank has them", "sizes behind values"],
)
def test_pieces_in_another_order_or_of_other_sizes(monkeypatch, module, right, wrong, made):
    reduced(**made)
    seed(monkeypatch, module, right, wrong)
    with pytest.raises(AssertionError, match=r"differs|at others|an all-to-all|not of one size"):
        reduced(**made)


def test_replicas_that_reduce_in_other_orders():
    def others(state, batches):
        def job(pipeline):
            runner = pipeline.runner
            if pipeline.transport.replica and runner.rank == 0:
                schedule = moved(runner.schedule, 0, "3REDUCE_GRAD", "0REDUCE_GRAD")
                bodies = kernels(runner.program, host_here())
                pipeline.runner = RankRunner(runner.program, schedule, runner.rank, bodies)
            return steps_of(state, batches)(pipeline)

        return job

    reduced()
    with pytest.raises(AssertionError, match=r"differs|at others|an all-to-all"):
        reduced(job=others)


def test_a_kind_of_collective_that_was_not_connected(monkeypatch):
    """Each kind connects anew: what was used once for the exchange is not for the gathering."""
    used = warm_up._USES[warm_up.REDUCE]
    for some in used:
        monkeypatch.setitem(warm_up._USES, warm_up.REDUCE, (some,))
        with pytest.raises(Stuck, match=r"REDUCE_GRAD .*: its host connects reduce .*in a circle"):
            on_tied_ranks(pace=Pace.KEPT)


@pytest.mark.parametrize("pace", Pace)
def test_training_and_evaluating_in_one_world(pace):
    """In one order on all ranks; a rank that evaluates first waits for who trains first."""
    evaluating = on_ranks(families.forward_only(2, 2), case=Case.EVALUATION)
    training = on_ranks(families.one_f_one_b(2, 2))
    steps = [
        steps_of(*skipping(case, microbatches=2)[1:]) for case in (Case.TRAINING, Case.EVALUATION)
    ]

    def both(pipeline, other_first=()):
        pipelines = [pipeline, beside(pipeline, *evaluating)]
        order = [0, 1, 0, 1]
        for at in order[::-1] if pipeline.own.rank in other_first else order:
            steps[at](pipelines[at])

    on_strict_ranks(*training, both, pace=pace)
    with pytest.raises(AssertionError):
        on_strict_ranks(*training, lambda one: both(one, other_first=[1]), pace=pace)
