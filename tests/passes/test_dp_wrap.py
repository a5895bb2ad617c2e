"""Which gradients travel together, and who owns them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import captured, clusters

import pfeife
from pfeife.ir.parts import Role
from pfeife.lowering.buckets import buckets_of, largest_share, owned_bytes
from pfeife.testing import plans


@settings(max_examples=30)
@given(st.data())
def test_buckets_and_shares(data):
    """No bucket is too large unless by one gradient, none has what is reduced elsewhere or later;
    the shares of replicas differ by no more than the largest gradient, and known owners stay."""
    fused = clusters(captured("TiedGPT")[1])
    plan = data.draw(plans(fused, 2))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    mesh = pfeife.Mesh(len(plan.schedule.ranks), data.draw(st.integers(2, 4)))
    size = data.draw(st.sampled_from([1, 1000, 4000, 2**20]))
    how = data.draw(st.sampled_from(["average", "shard"]))
    names = sorted({port.fqn for port in sent.ports(Role.GRADIENT)})
    owners = st.none() | st.integers(0, mesh.replicas - 1)
    known = data.draw(st.dictionaries(st.sampled_from(names), owners, max_size=3))
    replicas = pfeife.Replicas(mesh.replicas, how, size, known)
    wrapped = pfeife.dp_wrap(mesh, replicas)(sent)
    buckets = buckets_of(wrapped)
    assert sorted(one.name for b in buckets for one in b.reductions) == names
    for bucket in buckets:
        alike = {(one.stages[0], one.ranks, one.owner is None) for one in bucket.reductions}
        assert len(alike) == 1 and (bucket.bytes <= size or len(bucket.reductions) == 1)
        pieces = sum(bucket.piece(k, 0) for k in range(mesh.replicas)) * len(bucket.first.ranks)
        rest = pieces - sum(bucket.elements) * (len(bucket.first.ranks) if bucket.owned else 1)
        assert rest == 0 if bucket.owned else 0 <= rest < bucket.members
    found = {one.name: one.owner for one in wrapped.reductions}
    assert {name: found[name] for name in known} == known
    if how == "average" or known:
        assert all((found[n] is None) == (how == "average") for n in names if n not in known)
        return
    sizes = {port.fqn: port.bytes for port in sent.ports(Role.GRADIENT)}
    for rank in range(mesh.ranks):
        mine = [one for one in wrapped.reductions if rank in one.ranks]
        held = owned_bytes(wrapped, rank)
        assert held.total() == sum(sizes[one.name] for one in mine)
        tied = sum(sizes[one.name] for one in mine if len(one.ranks) > 1)
        largest = max((sizes[one.name] for one in mine), default=0)
        assert max(held.values()) - min(held.values()) <= largest + tied


def test_what_members_keep_is_shared_out_evenly():
    """By the bytes that a keeper has: of a matrix that is cut, all of it, as of one that is not."""
    sizes = {"0": (16, 32), "1": (32, 16), "2": (16, 9), "3": (9, 16), "4": (16, 9)}
    layers = [torch.nn.Linear(*size, bias=False) for size in sizes.values()]
    net = torch.nn.Sequential(*layers)
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(8, 16))
    places = {"*": "gathered", "0.weight": 0, "1.weight": 1}
    keepers = dict.fromkeys(dict(net.named_parameters()), 0)
    fused = pfeife.compose(pfeife.shard(places, 4, keepers=keepers), pfeife.fuse())(flat)
    plan = pfeife.Plan((0,) * fused.units, pfeife.sched.families.gpipe(1, 2))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    wrapped = pfeife.dp_wrap(pfeife.Mesh(1, 2), pfeife.Replicas(2, "shard"))(sent)
    held = owned_bytes(wrapped, 0)
    assert sorted(held[replica, 0] for replica in range(2)) == [2624, 3200]
    assert not any(held[replica, member] for replica in range(2) for member in (1, 2, 3))
    with pytest.raises(ValueError, match=r"member 4 keeps 0\.weight, of 4"):
        pfeife.shard(places, 4, keepers={"0.weight": 4})(flat)


def test_other_words_are_refused():
    with pytest.raises(ValueError, match=r"Replicas.how='zero': must be 'average' or 'shard'"):
        pfeife.Replicas(2, "zero")
    with pytest.raises(ValueError, match=r"Replicas.count=3: the mesh has 2 replicas"):
        pfeife.dp_wrap(pfeife.Mesh(1, 2), pfeife.Replicas(3))
    with pytest.raises(ValueError, match="option data_parallel='zero': must be 'average' or 'sha"):
        pfeife.compile(lambda x: x, data_parallel="zero")


def test_a_parameter_larger_than_a_share():
    """It is never cut: its owner has it, and the others share out the rest."""
    net = torch.nn.Sequential(torch.nn.Embedding(70, 8), torch.nn.Linear(8, 8, bias=False))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    fused = pfeife.fuse()(pfeife.capture(lambda x: net(x).square().mean(), tokens))
    plan = pfeife.Plan((0,) * fused.units, pfeife.sched.families.gpipe(1, 2))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    wrapped = pfeife.dp_wrap(pfeife.Mesh(1, 4), pfeife.Replicas(4, "shard"))(sent)
    assert list(owned_bytes(wrapped, 0).values()) == [2240, 256, 0, 0]
    assert largest_share(wrapped, 1) == 4 * 2240 / 2496
    assert largest_share(pfeife.dp_wrap(pfeife.Mesh(1, 4))(sent), 1) == 1
