"""How the losses and the other results of microbatches combine, and which result is the loss."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from listening import said
from rows import row
from torch import nn

import pfeife
from pfeife.testing import own_gradients

WORDS = 20


def lm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS))


def text(rows: int = 4, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(WORDS, (2, rows, length), generator=seeded)
    return tokens, targets


def scores(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).flatten(0, 1)


def plainly(
    model: nn.Module, step: Callable, microbatches: list[tuple], divisor: int = 1
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Plain accumulation: `(loss / divisor).backward()` for each."""
    model.zero_grad()
    losses = [step(*one) / divisor for one in microbatches]
    for loss in losses:
        loss.backward()
    gradients = {name: g.clone() for name, g in own_gradients(model).items()}
    model.zero_grad()
    return sum(losses[1:], losses[0]).detach(), gradients


def check(
    model: nn.Module,
    loss: torch.Tensor,
    expected: tuple[torch.Tensor, dict[str, torch.Tensor]],
    same: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> None:
    """The loss and the gradients that this rank has, bit for bit unless said otherwise."""
    same = same or bitwise
    loss.backward()
    same(loss.detach(), expected[0])
    found = own_gradients(model)
    assert found
    for name, gradient in found.items():
        same(gradient, expected[1][name])


def bitwise(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(one, other), f"{one} {other}"


def parts(batch: tuple, count: int) -> list[tuple]:
    cut = [x.chunk(count) if x.dim() else [x] * count for x in batch]
    return list(zip(*cut, strict=True))


@row(ranks=(1, 2))
def a_sum_over_a_count_that_is_an_input():
    model, batch = lm(), (*text(), torch.tensor(24))

    def step(tokens, targets, count):
        return F.cross_entropy(scores(model, tokens), targets.flatten(), reduction="sum") / count

    expected = plainly(model, step, parts(batch, 2))
    check(model, pfeife.compile(step, microbatches=2)(*batch), expected)


@row(ranks=(1, 2))
def a_sum_with_noise_on_the_way():
    """As NEFTune adds to embeddings, and as large in all microbatches; here none of it is left."""
    model, batch = lm(), (*text(), torch.tensor(24))

    def step(tokens, targets, count):
        found = scores(model, tokens)
        noise = torch.zeros_like(found).uniform_(-0.5, 0.5) + torch.empty_like(found).normal_()
        return F.cross_entropy(found + 0 * noise, targets.flatten(), reduction="sum") / count

    expected = plainly(model, step, parts(batch, 2))
    check(model, pfeife.compile(step, microbatches=2)(*batch), expected)


@row(ranks=(1, 2))
def a_sum_over_a_number_that_may_count_rows():
    """24 is 12 times the rows of a microbatch; in a larger one it would be the same."""
    model, batch = lm(), text()

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten(), reduction="sum") / 24

    expected = plainly(model, step, parts(batch, 2))
    check(model, pfeife.compile(step, microbatches=2)(*batch), expected)


@row(ranks=(1,))
def a_mean_times_the_rows():
    """A sum, if no target is ignored, which nobody can know before: its average is another one."""
    model, batch = lm(), text()

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten()) * tokens.numel()

    try:
        pfeife.compile(step, microbatches=2)(*batch)
    except ValueError as error:
        assert "counts the rows of a microbatch, which mul.Tensor is given" in str(error), error
    else:
        raise AssertionError("not refused")
    expected = plainly(model, step, parts(batch, 2))
    check(model, pfeife.compile(step, microbatches=2, loss_reduction="sum")(*batch), expected)


@row(ranks=(1, 2))
def a_sum_by_name():
    """A sum and a penalty that the graph adds up otherwise: the user knows better."""
    model, batch = lm(), text()

    def step(tokens, targets):
        loss = F.cross_entropy(scores(model, tokens), targets.flatten(), reduction="sum")
        return loss + 1e-3 * model[3].weight.square().sum()

    expected = plainly(model, step, parts(batch, 2))
    with said() as found:
        loss = pfeife.compile(step, microbatches=2, loss_reduction="sum")(*batch)
    # Within rounding: the weight of the penalty may be one that two stages share.
    check(model, loss, expected, torch.testing.assert_close)
    assert not found, found


@row(ranks=(1, 2))
def a_sum_in_replicas():
    model, batch = lm(), text()

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten(), reduction="sum")

    expected = plainly(model, step, parts(batch, 4))
    found = pfeife.compile(step, microbatches=4, replicas=2, stages=1)(*batch)
    check(model, found, expected, torch.testing.assert_close)  # replicas add up otherwise


@row(ranks=(1, 2))
def a_loss_that_nobody_can_tell():
    """A root of a mean: averaged as before, and one warning names the line, on rank 0."""
    model, batch = lm(), text()

    def step(tokens, targets):
        return scores(model, tokens).square().mean().sqrt() + 0 * targets.sum()

    expected = plainly(model, step, parts(batch, 2), 2)
    with said() as found:
        compiled = pfeife.compile(step, microbatches=2)
        compiled(*batch)
        check(model, compiled(*batch), expected)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    assert len(found) == (rank == 0), found
    assert rank or ("sqrt in File" in found[0] and "loss_reduction=" in found[0]), found


class Experts(nn.Module):
    """Each token is handled by one expert, those of all rows side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.weights = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chosen = self.route(tokens).argmax(-1)
        order = chosen.argsort()
        found = torch.bmm(tokens[order].unsqueeze(1), self.weights[chosen[order]]).squeeze(1)
        return x + torch.zeros_like(tokens).index_add(0, order, found).view_as(x)


def with_experts() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8), Experts(), nn.Dropout(0.0), nn.Linear(8, WORDS))
    return nn.Sequential(nn.Embedding(WORDS, 8), *layers)


def unwarned(model: nn.Module, step: Callable, divisor: int) -> None:
    """How its loss combines is found without asking anybody."""
    batch = text()
    expected = plainly(model, step, parts(batch, 2), divisor)
    with said() as found:
        check(model, pfeife.compile(step, microbatches=2)(*batch), expected)
    assert not found, found


@row(ranks=(1, 2))
def tokens_that_experts_sort():
    """No rule follows rows through a sort of all tokens: a run shows where they are back."""
    model = with_experts()
    unwarned(model, lambda x, y: F.cross_entropy(scores(model, x), y.flatten()), 2)


@row()
def a_sum_behind_experts():
    model = with_experts()

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten(), reduction="sum")

    unwarned(model, step, 1)


@row()
def tokens_that_stay_sorted():
    """What a run shows not to be rows is not taken for rows: a sum of differences of neighbours
    that may be of two rows is averaged, with a warning."""
    model, batch = with_experts(), text()

    def step(tokens, targets):
        sorted_ones = scores(model, tokens).sum(-1).sort()[0]
        return (sorted_ones[1:] - sorted_ones[:-1]).square().sum() + 0 * targets.sum()

    expected = plainly(model, step, parts(batch, 2), 2)
    with said() as found:
        check(model, pfeife.compile(step, microbatches=2)(*batch), expected)
    assert len(found) == 1 and "depend on one another, in sort in" in found[0], found


@row()
def classes_with_weights():
    """A warning names the line to write, which is that of the whole batch."""
    torch.manual_seed(0)
    model, weight = nn.Linear(8, 3), torch.tensor([1.0, 2.0, 5.0])
    x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
    with said() as found:
        pfeife.compile(lambda x, y: F.cross_entropy(model(x), y, weight=weight), microbatches=2)(
            x, y
        )
    assert len(found) == 1 and "total = weight[targets].sum()" in found[0], found

    def step(x, y, total):
        return F.cross_entropy(model(x), y, weight=weight, reduction="sum") / total

    with said() as found:
        pfeife.compile(step, microbatches=2)(x, y, weight[y].sum()).backward()
    assert not found, found
    gradients = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), y, weight=weight).backward()
    for one, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, one.grad)  # sums in another order


@row()
def a_sum_right_behind_what_no_rule_follows():
    """What no rule knows is looked at itself, not only what comes of it."""
    model = lm()

    def step(tokens, targets):
        return F.glu(scores(model, tokens)).sum()

    unwarned(model, step, 1)


@row()
def rows_of_which_a_small_mean_is_taken():
    """Other rows are in each, if only by a thousandth: no rows, and a warning says so."""
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        return (found + 1e-3 * found.mean(0)).square().sum()

    expected = plainly(model, step, parts(batch, 2), 2)
    with said() as found:
        check(model, pfeife.compile(step, microbatches=2)(*batch), expected)
    assert len(found) == 1 and "depend on one another, in add in" in found[0], found


@row()
def experts_by_the_name():
    """Nobody has said that the rows are the batch: that a run shows it is enough."""
    model, (tokens, targets) = with_experts(), text()
    expected = plainly(
        model, lambda x, y: F.cross_entropy(scores(model, x), y.flatten()), [(tokens, targets)]
    )
    step = torch.compile(
        lambda x, y: F.cross_entropy(scores(model, x), y.flatten()),
        backend="pfeife",
        dynamic=True,
        options={"microbatches": 2},
    )
    check(model, step(tokens, targets), expected, torch.testing.assert_close)


@row(ranks=(1, 2))
def a_token_mean_with_uneven_masks():
    """The mean of all tokens, as of the uncut batch; not the mean of the microbatches' means."""
    model, (tokens, targets) = lm(), text()
    targets[:2, 1:] = -100

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten())

    expected = plainly(model, step, [(tokens, targets)])
    found = pfeife.compile(step, microbatches=2)(tokens, targets)
    check(model, found, expected, torch.testing.assert_close)


@row(ranks=(1, 2))
def a_token_mean_with_uneven_masks_in_replicas():
    model, (tokens, targets) = lm(), text()
    targets[:2, 1:] = -100

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten())

    expected = plainly(model, step, [(tokens, targets)])
    found = pfeife.compile(step, microbatches=4, replicas=2, stages=1)(tokens, targets)
    check(model, found, expected, torch.testing.assert_close)


@row(ranks=(1, 2))
def a_microbatch_without_targets():
    """It counts for nothing, where its own mean is 0/0."""
    model, (tokens, targets) = lm(), text()
    targets[:2] = -100

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten())

    expected = plainly(model, step, [(tokens, targets)])
    found = pfeife.compile(step, microbatches=2)(tokens, targets)
    check(model, found, expected, torch.testing.assert_close)


@row("microbatch 0 has nothing to take the mean of", ranks=(1, 2))
def no_targets_at_all():
    model, (tokens, targets) = lm(), text()

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten())

    pfeife.compile(step, microbatches=2)(tokens, torch.full_like(targets, -100))


@row("microbatch 1 has nothing to take the mean of", ranks=(1, 2))
def an_empty_mask():
    """Its gradients would be nan."""
    model, (tokens, _) = lm(), text()

    def step(tokens, mask):
        each = model(tokens).square().mean(-1)
        return (each * mask).sum() / mask.sum()

    mask = torch.ones(4, 6)
    mask[2:] = 0
    pfeife.compile(step, microbatches=2)(tokens, mask)


@row(ranks=(1, 2))
def a_mean_over_a_mask():
    model, (tokens, _) = lm(), text()
    mask = (torch.arange(24).view(4, 6) % 5 < 2).float()

    def step(tokens, mask):
        each = model(tokens).square().mean(-1)
        return (each * mask).sum() / mask.sum().clamp(min=1)

    expected = plainly(model, step, [(tokens, mask)])
    found = pfeife.compile(step, microbatches=2)(tokens, mask)
    check(model, found, expected, torch.testing.assert_close)


@row(ranks=(1, 2))
def two_means_by_different_counts():
    """No weight of a microbatch is right for both: averaged, and said."""
    model, (tokens, targets) = lm(), text()
    targets[:2, 1:] = -100

    def step(tokens, targets):
        found = scores(model, tokens)
        return F.cross_entropy(found, targets.flatten()) + 0.1 * found.square().mean()

    expected = plainly(model, step, parts((tokens, targets), 2), 2)
    with said() as found:
        loss = pfeife.compile(step, microbatches=2)(tokens, targets)
    check(model, loss, expected)
    assert len(found) == 1 and "[2.0, 12.0]" in found[0] and "reductions.py" in found[0], found


@row(ranks=(1, 2))
def a_loss_by_its_name():
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        return {
            "aux": (found.square().mean(), None, found.sum()),
            "loss": F.cross_entropy(found, targets.flatten()),
        }

    expected = plainly(model, lambda *one: step(*one)["loss"], parts(batch, 2), 2)
    check(model, pfeife.compile(step, microbatches=2, loss="loss")(*batch)["loss"], expected)


@row(ranks=(1, 2))
def a_loss_by_its_path():
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        loss = F.cross_entropy(found, targets.flatten())
        return {"aux": (found.square().mean(), None, found.sum()), "loss": loss}

    expected = plainly(model, lambda *one: step(*one)["aux"][2], parts(batch, 2))
    compiled = pfeife.compile(step, microbatches=2, loss=("aux", 2))
    check(model, compiled(*batch)["aux"][2], expected)


@row(ranks=(1,))
def a_loss_by_its_index():
    """The third tensor of the step; Dynamo's graph has one less, for two are the same."""
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        other = found.square().mean()
        return other, other, F.cross_entropy(found, targets.flatten()), found.abs().mean()

    expected = plainly(model, lambda *one: step(*one)[2], parts(batch, 2), 2)
    check(model, pfeife.compile(step, microbatches=2, loss=2)(*batch)[2], expected)


@row("loss='los': there are no results ['los']; the step returns ['aux', 'loss']", ranks=(1, 2))
def a_name_that_is_not_returned():
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        return {"aux": found.mean(), "loss": F.cross_entropy(found, targets.flatten())}

    pfeife.compile(step, microbatches=2, loss="los")(*batch)


@row("results ['aux', 'loss'] are all differentiable scalars", ranks=(1,))
def two_losses_are_called_by_their_names():
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        return {"aux": found.mean(), "loss": F.cross_entropy(found, targets.flatten())}

    pfeife.compile(step, microbatches=2)(*batch)


@row(ranks=(1, 2))
def evaluation_after_training():
    """What was the loss with gradients is the loss without, even where nothing else tells."""
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        return F.cross_entropy(found, targets.flatten()).exp().log(), found.detach()

    compiled = pfeife.compile(step, microbatches=2)
    trained, _ = compiled(*batch)
    trained.backward()
    with torch.no_grad():
        assert torch.equal(compiled(*batch)[0], trained)


@row(ranks=(1, 2))
def evaluation_alone():
    model, batch = lm(), text()

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens), targets.flatten())

    with torch.no_grad():
        expected = [step(*part) / 2 for part in parts(batch, 2)]
        found = pfeife.compile(step, microbatches=2)(*batch)
    assert torch.equal(found, expected[0] + expected[1])


@row(ranks=(1, 2))
def counts_and_accuracies():
    """Right without `reduce=`: a count is added up, a mean averaged."""
    model, batch = lm(), text()

    def step(tokens, targets):
        found = scores(model, tokens)
        right = found.argmax(-1) == targets.flatten()
        loss = F.cross_entropy(found, targets.flatten())
        return loss, right.sum(), right.float().mean(), found.argmax(-1).view_as(tokens)

    whole = step(*batch)
    loss, right, accuracy, words = pfeife.compile(step, microbatches=2)(*batch)
    assert torch.equal(right, whole[1]) and torch.equal(words, whole[3])
    torch.testing.assert_close((loss, accuracy), (whole[0], whole[2]))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=WORDS,
        )
    )  # fmt: skip


@row(ranks=(1, 2), whole=(1,))
def hugging_face_with_num_items_in_batch():
    """What its Trainer passes: labels, and a tensor that counts those of the whole batch."""
    model, (tokens, labels) = llama(), text()
    labels[:2, 3:] = -100
    batch = tokens, labels, (labels[:, 1:] != -100).sum()

    def step(tokens, labels, count):
        kept = {"use_cache": False, "num_items_in_batch": count}
        return model(input_ids=tokens, labels=labels, **kept).loss

    expected = plainly(model, step, parts(batch, 2))
    with said() as found:
        check(model, pfeife.compile(step, microbatches=2)(*batch), expected)
    assert not found, found


@row()
def views_of_one_text():
    """All words but the last, and all but the first, of the same rows: flattened, both are copies,
    and so they are in the step for more rows, which tells whether 8 counts rows."""
    rows = torch.randint(WORDS, (4, 7), generator=torch.Generator().manual_seed(1))
    model, (tokens, targets) = lm(), (rows[:, :-1], rows[:, 1:])

    def step(tokens, targets):
        return F.cross_entropy(scores(model, tokens) / 8, targets.flatten())

    expected = plainly(model, step, parts((tokens, targets), 2), 2)
    with said() as found:
        compiled = pfeife.compile(step, microbatches=2)
        check(model, compiled(tokens, targets), expected)
        with torch.no_grad():
            bitwise(compiled(tokens, targets), expected[0])
    assert not found, found


@row(whole=(1,))
def hugging_face_in_microbatches_of_one_row():
    """Where it looks for packed sequences, and a dimension of 1 may be that of the row or not."""
    model, (tokens, labels) = llama(), text(rows=3)
    batch = tokens, labels, (labels[:, 1:] != -100).sum()

    def step(tokens, labels, count):
        kept = {"use_cache": False, "num_items_in_batch": count}
        return model(input_ids=tokens, labels=labels, **kept).loss

    expected = plainly(model, step, parts(batch, 3))
    with said() as found:
        check(model, pfeife.compile(step, microbatches=3)(*batch), expected)
    assert not found, found


@row(ranks=(1, 2), whole=(1,))
def hugging_face_with_padding():
    """Its own mean over the labels that are not ignored, of the whole batch; and its own result,
    which has the loss by name."""
    model, (tokens, labels) = llama(), text()
    labels[:2, 3:] = -100
    mask = (labels != -100).long()

    def step(tokens, labels, mask):
        return model(input_ids=tokens, labels=labels, attention_mask=mask, use_cache=False)

    expected = plainly(model, lambda *one: step(*one).loss, [(tokens, labels, mask)])
    loss = pfeife.compile(step, microbatches=2, loss="loss")(tokens, labels, mask).loss
    check(model, loss, expected, torch.testing.assert_close)


@row(ranks=(1, 2), whole=(1,))
def hugging_face_as_it_comes():
    """The same with all its defaults: a cache that begins with empty tensors, positions counted
    by arange (as many as would be rows), a mask of its own."""
    model, (tokens, labels) = llama(), text(rows=6)
    labels[:2, 3:] = -100

    def step(tokens, labels):
        return model(input_ids=tokens, labels=labels).loss

    expected = plainly(model, step, [(tokens, labels)])
    with said() as found:
        check(
            model,
            pfeife.compile(step, microbatches=2)(tokens, labels),
            expected,
            torch.testing.assert_close,
        )
    assert not found, found


@row()
def constants_that_count_rows():
    """Tensors made from a list in which one number is that of the rows; also of complex ones."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for part in (1.0, 1j):
        model = nn.Linear(3, 3)

        def step(x, part=part, model=model):
            counts = torch.tensor([part * len(x), part * 2 * len(x), part * 5])
            return (model(x).sum(0) / counts.abs()).sum()

        try:  # a sum, and two means: their average is none of them
            pfeife.compile(lambda x, step=step: step(x), microbatches=2)(x)
        except ValueError as error:
            assert "counts the rows of a microbatch, which lift_fresh" in str(error), error
        else:
            raise AssertionError("not refused")


@row(ranks=(1, 2))
def what_was_the_loss_without_gradients():
    """Of two scalars the one that was differentiated, where no rule tells of either."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def step(x):
        error = model(x).square().mean()
        return {"metric": error.detach(), "loss": error.sqrt()}

    expected = sum(step(part)["loss"].detach() / 2 for part in x.chunk(2))
    compiled = pfeife.compile(step, microbatches=2)
    with said():
        assert torch.equal(compiled(x)["loss"], expected)
        with torch.no_grad():
            assert torch.equal(compiled(x)["loss"], expected)


def bounded(model, rows):
    return model(rows).clamp(max=0.05 * len(rows)).mean()


def sloped(model, rows):
    return F.leaky_relu(model(rows), 0.1 * len(rows)).mean()


def filled(model, rows):
    hidden = model(rows)
    return hidden.masked_fill(hidden > 0, 0.1 * rows.shape[0]).mean()


def beside_a_weight(model, rows):
    return model(rows).mean() + model.weight.abs().clamp(max=0.01 * len(rows)).sum()


def of_some_columns(model, rows):
    return model(rows)[:, : len(rows)].mean()


def of_places(model, rows):
    return (model(rows) * torch.arange(len(rows)).float().sum()).mean()


def of_a_tensor(model, rows):
    return model(rows).clamp(max=torch.tensor(0.05 * len(rows))).mean()


COUNTING = (of_a_tensor, bounded, sloped, filled, beside_a_weight, of_some_columns, of_places)


@row()
def numbers_that_count_rows_where_no_rule_sees_them():
    """As a bound, a slope, a value, a size: through both doors, and as a result with rows."""
    model, rows = nn.Linear(8, 8), torch.randn(8, 8)
    steps = [functools.partial(step, model) for step in COUNTING]
    for step in (*steps, lambda rows: model(rows).clamp(max=0.05 * len(rows))):
        for capture in ("dynamo", "trace"):
            compiled = pfeife.compile(step, microbatches=4, capture=capture, in_dims=0)
            try:
                compiled(rows)
            except ValueError as error:
                assert "counts the rows of a microbatch" in str(error), error
            else:
                raise AssertionError(f"{step} by {capture} is not refused")


@row("the loss depends on a number that counts the rows of a microbatch, which clamp.default")
def a_number_that_counts_rows_by_the_name():
    model = nn.Linear(4, 4)
    step = torch.compile(
        lambda rows: model(rows).clamp(max=0.05 * len(rows)).mean(),
        backend="pfeife",
        options={"microbatches": 4},
        dynamic=True,
    )
    step(torch.randn(8, 4))


@row()
def numbers_that_count_rows_and_are_divided_by():
    model, rows = nn.Linear(8, 8), torch.randn(8, 8)

    def step(rows):
        hidden = model(rows).view(len(rows), 2, 4).expand(len(rows), 2, 4)
        return hidden.sum() / len(rows) + (hidden / rows.shape[0]).sum()

    expected = plainly(model, step, [(rows,)])  # of the whole batch, which adds up at once
    compiled = pfeife.compile(step, microbatches=4)
    check(model, compiled(rows), expected, torch.testing.assert_close)
