"""nn.LSTM, nn.GRU and nn.RNN: the same numbers as eager's, and the dropout between their layers."""

import copy

import torch
from rows import row
from torch import nn

import pfeife
from pfeife.testing import eager_accumulation, own_gradients


class Reader(nn.Module):
    """A recurrent network between two layers, its last state among the results."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6 * (1 + options["bidirectional"]), 3)
        self.layers = kind(6, 6, 2, batch_first=True, **options)

    def forward(self, x):
        found, state = self.layers(self.before(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.after(found).square().mean() + last.square().mean()


def sequences(seed=1, count=4):
    return torch.randn(count, 2, 6, generator=torch.Generator().manual_seed(seed))


def same_as_eager(kind, microbatches=2, **options):
    """A dropout of 1 takes everything away between the layers, whatever is drawn."""
    model = Reader(kind, **options)
    other = copy.deepcopy(model)
    step = pfeife.compile(model, microbatches=microbatches, stages=2)
    for seed in range(2):
        parts = [(part,) for part in sequences(seed).chunk(microbatches)]
        expected = eager_accumulation(other, other, parts)
        model.zero_grad()
        loss = step(sequences(seed))
        loss.backward()
        assert torch.equal(loss, expected.loss), (kind, options)
        mine = own_gradients(model)
        for name, gradient in mine.items():
            assert torch.equal(gradient, expected.gradients[name]), (kind, options, name)


@row(ranks=(1, 2))
def an_lstm():
    same_as_eager(nn.LSTM, microbatches=4, bidirectional=True, dropout=1.0)


@row(whole=(1,))
def other_layers():
    same_as_eager(nn.GRU, bidirectional=False, dropout=1.0)
    same_as_eager(nn.RNN, bidirectional=True, dropout=0.0)


@row()
def an_lstm_is_evaluated():
    model = Reader(nn.LSTM, bidirectional=False, dropout=0.5).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        found = pfeife.compile(lambda x: model.layers(x)[0], microbatches=2)(sequences())
        parts = [other.layers(part)[0] for part in sequences().chunk(2)]
    assert torch.equal(found, torch.cat(parts))


@row(whole=(1,))
def a_part_is_not_trained():
    """Whose kernel in eager is another one."""
    for frozen in (True, False):
        model = Reader(nn.LSTM, bidirectional=False, bias=False)
        model.layers.requires_grad_(not frozen)

        def step(x, model=model, frozen=frozen):
            with torch.set_grad_enabled(frozen):
                found = model.layers(x)[0]
            return model.after(found).square().mean()

        expected = eager_accumulation(step, model, [(part,) for part in sequences().chunk(2)])
        model.zero_grad()
        assert torch.equal(pfeife.compile(step, microbatches=2)(sequences()), expected.loss)


@row()
def every_microbatch_draws_for_itself():
    """And the step draws anew at every call."""
    model = Reader(nn.LSTM, bidirectional=False, dropout=0.5)
    step = pfeife.compile(lambda x: model.layers(x)[0], microbatches=2, loss="outside")
    twice = torch.cat([sequences(1, 2)] * 2)
    one, other = (step(twice).detach() for _ in range(2))
    assert not torch.equal(*one.chunk(2)) and not torch.equal(one, other)
