"""Where batches come from: each replica's own loader, or that of rank 0."""

import copy
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from listening import said
from rows import Row, add, row
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pfeife
from pfeife.integrations.together import from_main
from pfeife.runtime.distributed.process_group import join_world, world_so_far
from pfeife.testing import own_gradients

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Tagger(nn.Module):
    """As Hugging Face's models: arguments by name, the loss and the logits in a dict."""

    def __init__(self, total: bool = False):
        super().__init__()
        self.total = total
        self.layers = nn.Sequential(
            nn.Embedding(20, 8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 20)
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> dict:
        logits = self.layers(input_ids)
        how = "sum" if self.total else "mean"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        return {"loss": loss * scale, "logits": logits}


def tagger(total: bool = False) -> tuple[Tagger, Tagger]:
    torch.manual_seed(0)
    model = Tagger(total)
    return model, copy.deepcopy(model)


def batches(count: int = 4, smaller: bool = True) -> Iterator[dict[str, Any]]:
    """Of sixteen rows, the last one smaller; views, and other numbers of labels in each row."""
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        rows = 8 if smaller and index == count - 1 else 16
        tokens = torch.randint(20, (rows, 6), generator=generator)
        labels = tokens.masked_fill(torch.rand(rows, 6, generator=generator) < 0.4, -100)
        labels[-1] = -100 if index % 2 else 3
        yield {"input_ids": tokens[:, :-1], "labels": labels[:, 1:], "scale": 0.5 + index % 2}


def mine(batch: dict[str, Any]) -> dict[str, Any]:
    """The rows of this rank's replica, of two."""
    part = RANK // (RANKS // 2)
    cut = (k for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim())
    return {**batch, **{k: batch[k].chunk(2)[part] for k in cut}}


def loop_is_that_of_one_device(total: bool, values: bool | None, **options: Any) -> None:
    """Training with accumulation over two calls, and evaluation: losses, logits and gradients are
    those of the whole batch in one process, to within rounding. `values` is what `from_rank0` is
    told, None where each replica has a loader of its own."""
    torch._dynamo.reset()
    model, plain = tagger(total)
    if total and values is None:
        options["loss_reduction"] = "sum"  # which it has to be told where replicas have own batches
    step = pfeife.compile(model, microbatches=4, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    own = values is None
    loader = map(mine, batches()) if own else batches() if RANK == 0 else None
    given = loader if own else pfeife.from_rank0(loader, values=values)
    for index, (batch, whole) in enumerate(zip(given, batches(), strict=True)):
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(step(**batch)["loss"], plain(**whole)["loss"])
        model.train()
        found, expected = step(**batch), plain(**whole)
        rows = mine(expected)["logits"] if own else expected["logits"]
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["logits"].detach(), rows.detach())
        (found["loss"] / 2).backward()
        (expected["loss"] / 2).backward()
        gradients = own_gradients(model)
        assert gradients or RANKS == 4
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
        if index % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


_CASES = {
    "replicas": (None, {"batch": "replica", "replicas": 2}, (2, 4)),
    "rank 0": (True, {}, (2,)),
    "rank 0, to whom it concerns": (False, {"batch": "rank0"}, (2,)),
    "rank 0, to replicas": (False, {"batch": "rank0", "replicas": 2}, (4,)),
    "rank 0, traced": (False, {"batch": "rank0", "capture": "trace"}, (2,)),
}
_SHARED = ("replicas", "rank 0, to whom it concerns")
for _name, (_values, _options, _ranks) in _CASES.items():
    for _total in (False, True):
        _run = partial(loop_is_that_of_one_device, _total, _values, **_options)
        _shared = _name in _SHARED and _total == ("concerns" in _name)
        _whole = _ranks[1:] if _shared else _ranks
        _label = f"{_name}, {'sum' if _total else 'mean'}"
        add(globals(), Row(_label, _run, ranks=_ranks, whole=_whole))


@row(ranks=(4,))
def neighbours_that_are_replicas() -> None:
    """Ranks 0 and 2 are a pipeline, and have another batch than 1 and 3."""
    model, plain = tagger()
    step = pfeife.compile(model, microbatches=4, mesh="2,-2", batch="replica")
    whole = next(batches())
    part = {k: v.chunk(2)[RANK % 2] if k != "scale" else v for k, v in whole.items()}
    found, expected = step(**part), plain(**whole)
    torch.testing.assert_close(found["loss"], expected["loss"])
    logits = expected["logits"].chunk(2)[RANK % 2]
    torch.testing.assert_close(found["logits"].detach(), logits.detach())


@row(ranks=(2, 4), whole=(2,))
def a_sampler_for_replicas() -> None:
    """Every rank of a replica has the same samples; all replicas together have each once, in the
    steps in which one process has them."""
    data = TensorDataset(torch.arange(24))

    def epoch(number: int, rows: int, **more: Any) -> list[list[int]]:
        sampler = pfeife.data_sampler(data, **more)
        sampler.set_epoch(number)
        return [one.tolist() for (one,) in DataLoader(data, rows, sampler=sampler)]

    for number in (0, 1):
        alone = torch.utils.data.DistributedSampler(data, 1, 0)
        alone.set_epoch(number)
        expected = [sorted(list(alone)[at : at + 8]) for at in range(0, 24, 8)]
        found = epoch(number, 4, replicas=2)
        assert epoch(number, 8) == epoch(number, 8, replicas=1)
        assert list(pfeife.from_rank0([0])) == [0]  # there is a process group now
        told = [json.loads(text) for text in world_so_far().from_all_ranks(json.dumps(found))]
        pipelines = [told[: RANKS // 2], told[RANKS // 2 :]]
        assert all(one == ranks[0] for ranks in pipelines for one in ranks)
        steps = zip(pipelines[0][0], pipelines[1][0], strict=True)
        assert [sorted(one + other) for one, other in steps] == expected


def refused(words: str, call: Any, *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


@row(ranks=(2,))
def what_is_refused() -> None:
    """In words, on all ranks, which then go on."""
    model, _ = tagger()
    whole = next(batches())
    own = pfeife.compile(model, microbatches=4, replicas=2, batch="replica")
    loss = own(**mine(whole))["loss"]
    other = {**mine(whole), "input_ids": whole["input_ids"][: 4 + RANK]}
    refused("do not belong together", own, **other)
    shorter = {k: v[: 8 - 4 * RANK] if k != "scale" else v for k, v in mine(whole).items()}
    refused("ranks [1] have another one than rank 0", own, **shorter)
    assert torch.equal(own(**mine(whole))["loss"], loss)
    outside = pfeife.compile(model.layers, microbatches=2, replicas=2, batch="replica")
    refused("with the loss outside", outside, mine(whole)["input_ids"])
    zero = pfeife.compile(model, microbatches=4, batch="rank0", replicas=2)
    nothing = {} if RANK else whole
    torch.testing.assert_close(zero(**nothing)["loss"], loss)
    refused("a tensor that wants a gradient", zero, x=torch.ones(4, requires_grad=True))
    refused("it has a Tagger", zero, x=model)
    assert torch.equal(zero(**nothing)["loss"], zero(**nothing)["loss"])
    plain = pfeife.compile(model, microbatches=4, replicas=2)
    for batch in pfeife.from_rank0([whole] if RANK == 0 else None, values=False):
        refused("reads values of a batch that rank 0 alone has", plain, **batch)
    named = torch.compile(model, backend="pfeife", options={"batch": "rank0"}, dynamic=True)
    refused("use pfeife.compile", named, **whole)


@row(ranks=(4,))
def another_batch_within_a_replica() -> None:
    model, _ = tagger()
    step = pfeife.compile(model, microbatches=4, replicas=2, batch="replica")
    one, _, two, _ = batches(smaller=False)
    step(**mine(one))
    refused("ranks [3] have another one than rank 2", step, **mine(two if RANK == 3 else one))
    refused("is given the batch of its replica", step, **mine((one, two, two, one)[RANK]))
    step(**mine(two))


@row(
    "microbatch: input x with 3 rows does not divide into 2 microbatches of each replica; pass "
    "microbatches=2",
    ranks=(2,),
)
def rows_of_a_replica_that_do_not_divide() -> None:
    model, given = nn.Linear(4, 4), {"microbatches": 4, "replicas": 2, "batch": "replica"}
    step = torch.compile(lambda x: model(x).square().mean(), backend="pfeife", options=given)
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    step(x)


@row(ranks=(2,))
def what_the_main_process_has() -> None:
    join_world(torch.device("cpu"))
    value = {1: (2, [None, "x"]), "y": 1.5}
    assert from_main(value if RANK == 0 else None, "a value") == value
    refused("a value of a tensor [2]: give its numbers", from_main, torch.ones(2), "a value")
    refused("", from_main, object(), "a value")


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@row(ranks=(2,))
def a_loader_that_ends_fails_or_is_slow() -> None:
    """All ranks know of it; one that waits for the loader waits for as long as it takes."""
    model, _ = tagger()
    step = pfeife.compile(model, microbatches=2, timeout=1.0)

    def slow() -> Iterator[Any]:
        yield from batches(2)
        time.sleep(3)
        yield from batches(1)
        raise OSError("the disk is gone")

    loader = pfeife.from_rank0(slow() if RANK == 0 else None)
    count = 0
    try:
        with said():
            for batch in loader:
                count += 1
                step(**batch)
    except (OSError, ValueError) as error:
        assert str(error) == ("rank 0: OSError: " if RANK else "") + "the disk is gone", error
    assert count == 3
    assert len(pfeife.from_rank0([1, 2, 3] if RANK == 0 else None)) == 3
    names = pfeife.from_rank0(["a", {"b": (None, 0.5)}] if RANK == 0 else None)
    assert list(names) == ["a", {"b": (None, 0.5)}] == list(names)
    stream = DataLoader(Stream(), batch_size=2)  # its iterators know no length, and say so
    parts = list(pfeife.from_rank0(stream if RANK == 0 else None))
    assert [part.tolist() for part in parts] == [[0, 1], [2]]
    endless = pfeife.from_rank0((n for n in range(3)) if RANK == 0 else None)
    assert list(endless) == [0, 1, 2]
    try:
        len(endless)
    except TypeError as error:
        assert "no length" in str(error)
    else:
        raise AssertionError("a generator has a length")
    refused("wants a loader on rank 0", len, pfeife.from_rank0(None))
    one = next(batches(1))
    calls = [lambda: step(**one), lambda: next(iter(pfeife.from_rank0([1])))]
    refused("rank 1 is at the next batch of from_rank0", calls[RANK])
    step(**one)
    # What is wrong with the batch of rank 0 is said on all ranks, not that the others have none.
    alone = pfeife.compile(model, microbatches=4, batch="rank0", fit_smaller_batches=False)
    alone(**({} if RANK else one))
    odd = {n: v[:3] if isinstance(v, torch.Tensor) else v for n, v in one.items()}
    refused("a batch of 3 rows does not divide", lambda: alone(**({} if RANK else odd)))


@row(ranks=(2,))
def who_is_sent_what() -> None:
    """The first stage reads tokens, the last one labels."""
    model, _ = tagger()
    step = pfeife.compile(model, microbatches=4, batch="rank0")
    whole = next(batches())
    step(**({} if RANK else whole))
    pipeline = step.backend.compiled[0].pipeline
    ports = {port.fqn: port for port in pipeline.program.inputs}
    batch = {ports[name]: whole[name] for name in ("input_ids", "labels")}
    sizes = {rank: [one.shape for one in views] for rank, views in pipeline.reads(batch).items()}
    assert sizes == {0: [whole["input_ids"].shape], 1: [whole["labels"].shape]}
