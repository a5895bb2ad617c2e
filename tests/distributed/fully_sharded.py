"""Models that `fully_shard` has shared out over ranks: replicas, in the loop that was there."""

import copy
import logging
import os
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from rows import row
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pfeife

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 14), nn.GELU(), nn.Linear(14, 5))
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), inner, nn.Linear(5, 3)).double()


def shared_out(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(
    model: nn.Module, step: Callable, batches: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Losses, with what clipping sees of the gradients. Dimensions that ranks do not divide."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    figures = []
    for batch in batches:
        loss = step(batch)
        loss.backward()
        figures += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).detach()]
        optimizer.step()
        optimizer.zero_grad()
    return figures


@row(ranks=(4,))
def copies_of_what_is_shared_out() -> None:
    """HSDP: all of them are replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    plain = net()
    model = shared_out(copy.deepcopy(plain), mesh)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4)
    batches = torch.randn(2, 8, 3).double()
    figures = trained(model, step, [batch.chunk(4)[dist.get_rank()] for batch in batches])
    expected = trained(plain, lambda x: plain(x).square().mean(), [*batches])
    torch.testing.assert_close(figures, expected, rtol=1e-12, atol=0)
    assert step.backend.options.replicas == 4


@row(ranks=(2, 4))
def a_model_under_fully_shard() -> None:
    """With ranks of a pipeline that are no neighbours, as torch's meshes have them; checkpoints of
    it are those of a model that was never shared out."""
    replicas = 2
    mesh = init_device_mesh("cpu", (WORLD // replicas, replicas), mesh_dim_names=("pp", "dp"))["dp"]
    plain = net()
    model = shared_out(copy.deepcopy(plain), mesh)
    model(torch.ones(1, 3).double()).sum().backward()  # the last modules stay whole after that
    model[3].weight.is_special = True
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4)
    assert type(model) is nn.Sequential and not any("composable" in name for name in vars(model))
    plain(torch.ones(1, 3).double()).sum().backward()
    alike = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(p.grad, q.grad, rtol=1e-12) for p, q in alike)
    assert model[3].weight.is_special
    plain.zero_grad()
    model.zero_grad()
    batches = torch.randn(3, 8, 3).double()
    own = [batch.chunk(replicas)[mesh.get_local_rank()] for batch in batches]
    torch.testing.assert_close(
        trained(model, step, own),
        trained(plain, lambda x: plain(x).square().mean(), [*batches]),
        **{"rtol": 1e-12, "atol": 0},
    )
    options = step.backend.options
    assert (options.data_parallel, options.batch, options.replicas) == ("shard", "replica", 2)
    for name, value in pfeife.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-14)


@row(ranks=(4,))
def a_model_that_is_cut_over_members_too() -> None:
    """As torch's example of two dimensions has it; what is not cut has a mesh of replicas alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = net()
    model = copy.deepcopy(plain)
    parallelize_module(model[2], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shared_out(model, mesh["dp"])
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4)
    batches = torch.randn(3, 8, 3).double()
    own = [batch.chunk(2)[mesh["dp"].get_local_rank()] for batch in batches]
    torch.testing.assert_close(
        trained(model, step, own),
        trained(plain, lambda x: plain(x).square().mean(), [*batches]),
        **{"rtol": 1e-12, "atol": 0},
    )
    (compiled,) = step.backend.compiled
    splits = {port.fqn: port.split for port in compiled.program.ports(pfeife.Role.PARAMETER)}
    assert splits["2.0.weight"].dim == 0 and splits["2.2.weight"].dim == 1
    assert splits["0.weight"] is None and compiled.program.replicas == 2


@row(ranks=(2,))
def what_fully_shard_has_other_than_replicas_have() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))

    def refused(words: str, model: nn.Module, **options: object) -> None:
        with pytest.raises(ValueError, match=words):
            pfeife.compile(lambda x: model(x).mean(), microbatches=4, **options)
        assert isinstance(model[2][0].weight, DTensor), "what is refused is as it was"

    model = shared_out(net(), mesh)
    refused("option replicas=1: fully_shard has shared out the model over 2", model, replicas=1)
    refused(r"its replicas are the ranks \[0\] and \[1\], and fully_shard", model, mesh="2")
    precise = net()
    fully_shard(precise, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    refused("leave mp_policy out, and say param_dtype='bfloat16'", precise)
    with torch.device("meta"):
        empty = fully_shard(net(), mesh=mesh)
    refused("has put .* on meta, and its ranks compute on cpu: give parameters values", empty)

    model = shared_out(net(), mesh)
    last = model[3].bias
    with pytest.raises(ValueError, match=r"the variable last \(.*\) has it as it was: `del last`"):
        pfeife.compile(lambda x: model(x).mean(), microbatches=4)
    del last  # what is whole by then is a step of replicas all the same
    again = pfeife.compile(lambda x: model(x).mean(), microbatches=4)
    assert again.backend.options.replicas == WORLD

    model = shared_out(net(), mesh)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(ValueError, match="something still has it as it was, as an optimizer"):
        pfeife.compile(lambda x: model(x).mean(), microbatches=4)
    assert optimizer


@row(ranks=(2,))
def a_sum_over_the_rows_of_a_replica() -> None:
    """DDP and FSDP divide its gradients by the number of replicas, one device does not."""
    model, x = net(), torch.randn(8, 3).double()
    options = {"microbatches": 4, "replicas": 2, "batch": "replica"}
    step = pfeife.compile(lambda x: model(x).square().sum(), **options)
    with pytest.raises(pfeife.CollectiveError, match="would divide the gradients of 2 replicas"):
        step(x)
    step = pfeife.compile(lambda x: model(x).square().sum(), **options, loss_reduction="sum")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("pfeife").addHandler(handler)
    torch.testing.assert_close(step(x).detach(), 2 * model(x).square().sum().detach())
    step(x)
    copies = [text for text in warned if "all 2 replicas have the same rows" in text]
    assert len(copies) == 1, warned
    step(x + dist.get_rank())
    logging.getLogger("pfeife").removeHandler(handler)


@row(ranks=(2,))
def a_second_step_of_the_same_model() -> None:
    """It is a step of replicas as well, before the first one has run or after it. Both reach the
    model through a function and a dict."""
    mesh = init_device_mesh("cpu", (WORLD,))
    plain = net()
    model = shared_out(copy.deepcopy(plain), mesh)
    models = {"net": model}

    def forward(x: torch.Tensor) -> torch.Tensor:
        return models["net"](x)

    train = pfeife.compile(lambda x: forward(x).square().mean(), microbatches=4)
    evaluate = pfeife.compile(lambda x: forward(x).abs().mean(), microbatches=4)
    x = torch.randn(8, 3).double()
    own = x.chunk(2)[dist.get_rank()]
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(evaluate(own), plain(x).abs().mean(), rtol=1e-12, atol=0)
        trained(model, train, [own])
        trained(plain, lambda x: plain(x).square().mean(), [x])
    saved = get_model_state_dict(model)
    torch.testing.assert_close(saved["0.weight"], plain.state_dict()["0.weight"])


@row(ranks=(2,))
def what_one_rank_alone_refuses_of_a_model_under_fully_shard() -> None:
    """All do, and nothing is changed: not for a wrong option, nor for a hook."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = shared_out(net(), mesh)
    said = {"replicas": 1} if dist.get_rank() else {}
    with pytest.raises(ValueError, match="option replicas=1: fully_shard has shared out"):
        pfeife.compile(lambda x: model(x).mean(), microbatches=4, **said)
    with pytest.raises(ValueError, match=r"unknown options \['microbatch'\]"):
        pfeife.compile(lambda x: model(x).mean(), microbatch=4)
    hook = model[3].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"3\.weight has hooks, which would be gone"):
        pfeife.compile(lambda x: model(x).mean(), microbatches=4)
    hook.remove()
    assert isinstance(model[0].weight, DTensor)
    pfeife.compile(lambda x: model(x).mean(), microbatches=4)
    assert type(model[0].weight) is nn.Parameter
