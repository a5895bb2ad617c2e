"""Recurrent nets, in PyTorch's own modules and in loops."""

from collections.abc import Callable

import torch
from torch import nn

from coverage_models.example import Example
from coverage_models.small import WORDS, words


class Tagger(nn.Module):
    """A word's label from recurrent layers over all words."""

    def __init__(self, layers: nn.Module, width: int):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = layers
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found, _ = self.layers(self.embedding(tokens))
        return nn.functional.cross_entropy(self.head(found).flatten(0, 1), labels.flatten())


def tagger(make: Callable[[], nn.Module], width: int = 16) -> Callable[[], Example]:
    def build() -> Example:
        model = Tagger(make(), width)
        return Example(
            model,
            model,
            lambda rows, size: (words(rows, size), torch.randint(5, (rows, size))),
            (8, 10),
        )

    return build


class Cells(nn.Module):
    """Cells in a loop over time."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        state, found = None, []
        for now in x.unbind(1):
            state = self.cell(now, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1), None


class Packed(nn.Module):
    """A classifier of sequences of various lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.layers(packed)
        return self.head(last[-1]).square().mean()


def packed() -> Example:
    model = Packed()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return words(rows, size), torch.randint(2, size + 1, (rows,))

    return Example(model, model, draw, (8, 10))


class Attending(nn.Module):
    """A translator: a GRU reads, another one writes and looks back at what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 16), nn.Embedding(WORDS, 16)
        self.read = nn.GRU(16, 16, batch_first=True)
        self.write = nn.GRUCell(32, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, state = self.read(self.source(source))
        state, losses = state[0], []
        for place in range(target.shape[1] - 1):
            weight = torch.einsum("bd,btd->bt", state, memory).softmax(-1)
            seen = torch.einsum("bt,btd->bd", weight, memory)
            state = self.write(torch.cat([self.target(target[:, place]), seen], -1), state)
            losses.append(nn.functional.cross_entropy(self.head(state), target[:, place + 1]))
        return torch.stack(losses).mean()


def attending() -> Example:
    model = Attending()
    return Example(model, model, lambda n, size: (words(n, size), words(n, size)), (6, 8))


class Frames(nn.Module):
    """Convolutions of every frame, and an LSTM over them."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 8, 3, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * 9, 16),
        )  # fmt: skip
        self.recall = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.look(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.head(self.recall(seen)[0]).square().mean()


def frames() -> Example:
    model = Frames()
    return Example(model, model, lambda n, size: (torch.randn(n, size, 1, 16, 16),), (4, 6))


class Carrying(nn.Module):
    """Truncated backpropagation: the state of a batch is a buffer that the next one begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, WORDS)
        )
        self.register_buffer("mean_state", torch.zeros(1, 1, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state = self.mean_state.expand(1, len(tokens), 16).contiguous()
        found, last = self.layers(self.embedding(tokens), state)
        with torch.no_grad():
            self.mean_state.copy_(last.mean(1, keepdim=True))
        logits = self.head(found)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def carrying() -> Example:
    model = Carrying()
    return Example(model, model, lambda n, size: (words(n, size),), (8, 10))


MODELS = {
    "lstm": tagger(lambda: nn.LSTM(16, 16, 3, batch_first=True)),
    "lstm_both_ways": tagger(lambda: nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True)),
    "lstm_projected": tagger(lambda: nn.LSTM(16, 32, 2, batch_first=True, proj_size=16)),
    "gru": tagger(lambda: nn.GRU(16, 16, 3, batch_first=True)),
    "rnn_tanh": tagger(lambda: nn.RNN(16, 16, 3, batch_first=True)),
    "lstm_cells": tagger(lambda: Cells(nn.LSTMCell(16, 16))),
    "gru_cells": tagger(lambda: Cells(nn.GRUCell(16, 16))),
    "packed_lstm": packed,
    "attending_gru": attending,
    "conv_lstm": frames,
    "carried_state": carrying,
}
