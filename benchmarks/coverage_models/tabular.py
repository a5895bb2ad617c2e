"""Recommendation, tables and time series: torchfm, nbeats-pytorch and nets as papers have them."""

from collections.abc import Callable
from typing import Any

import torch
import torchfm.model.afi
import torchfm.model.afm
import torchfm.model.afn
import torchfm.model.dcn
import torchfm.model.dfm
import torchfm.model.fm
import torchfm.model.fnn
import torchfm.model.nfm
import torchfm.model.pnn
import torchfm.model.wd
import torchfm.model.xdfm
import transformers
from torch import nn

from coverage_models.example import Example
from coverage_models.small import WORDS, words

FIELDS = [5, 6, 7, 8]


def clicks(make: Callable[[], nn.Module]) -> Callable[[], Example]:
    """The probability of a click, from what was shown to whom."""

    def build() -> Example:
        model = make()

        def step(fields: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
            return nn.functional.binary_cross_entropy(model(fields), clicked)

        def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
            fields = torch.stack([torch.randint(count, (rows,)) for count in FIELDS], 1)
            return fields, torch.randint(2, (rows,)).float()

        return Example(model, step, draw, rows=4)

    return build


class Dlrm(nn.Module):
    """Numbers and bags of categories, and the products of all pairs of what they become."""

    def __init__(self, sparse: bool = False):
        super().__init__()
        self.bags = nn.ModuleList(
            [nn.EmbeddingBag(count, 8, mode="sum", sparse=sparse) for count in FIELDS]
        )
        self.below = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.above = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        low = self.below(dense)
        found = [bag(kinds[:, index]) for index, bag in enumerate(self.bags)]
        every = torch.stack([low, *found], 1)
        pairs = every @ every.mT
        first, second = torch.tril_indices(5, 5, -1).unbind()
        logit = self.above(torch.cat([low, pairs[:, first, second]], 1))
        return nn.functional.softplus(-logit).mean()


def dlrm(sparse: bool) -> Callable[[], Example]:
    def build() -> Example:
        model = Dlrm(sparse)

        def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
            return torch.randn(rows, 4), torch.randint(5, (rows, 4, 3))

        return Example(model, model, draw, rows=4)

    return build


class TwoTowers(nn.Module):
    """In-batch negatives: the rows depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (
            nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
            for _ in range(2)
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        scores = self.users(users) @ self.items(items).mT
        return nn.functional.cross_entropy(scores, torch.arange(len(users)))


def towers() -> Example:
    model = TwoTowers()
    return Example(
        model,
        model,
        lambda n, size: (torch.randint(WORDS, (n,)), torch.randint(WORDS, (n,))),
        rows=4,
    )


class SasRec(nn.Module):
    """The next item from those before it, beside one that was drawn by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(WORDS, 16, padding_idx=0), nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, seen: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor):
        length = seen.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.items(seen) + self.places(torch.arange(length))
        x = self.layers(x, mask=mask, is_causal=True)
        good, bad = (x * self.items(right)).sum(-1), (x * self.items(wrong)).sum(-1)
        return nn.functional.softplus(bad - good).mean()


def sasrec() -> Example:
    model = SasRec()
    return Example(
        model, model, lambda n, size: (words(n, size), words(n, size), words(n, size)), (8, 10)
    )


class Mmoe(nn.Module):
    """Two tasks with a gate each over experts that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.ReLU()) for _ in range(3)])
        self.gates = nn.ModuleList([nn.Linear(8, 3) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(16, 1) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.stack([expert(x) for expert in self.experts], 1)
        tasks = [
            head((gate(x).softmax(-1)[:, :, None] * found).sum(1))
            for gate, head in zip(self.gates, self.heads, strict=True)
        ]
        return torch.cat(tasks, 1).square().mean()


def numbers(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Example]:
    def build() -> Example:
        model = make()
        return Example(model, model, lambda rows, size: (torch.randn(rows, *shape),), rows=4)

    return build


class TabTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fields = nn.ModuleList([nn.Embedding(5, 16) for _ in FIELDS])
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Sequential(nn.Linear(68, 16), nn.SELU(), nn.Linear(16, 1))

    def forward(self, kinds: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        x = torch.stack([field(kinds[:, i]) for i, field in enumerate(self.fields)], 1)
        x = torch.cat([self.layers(x).flatten(1), self.norm(dense)], 1)
        return self.head(x).square().mean()


def tab_transformer() -> Example:
    model = TabTransformer()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(5, (rows, 4)), torch.randn(rows, 4)

    return Example(model, model, draw, rows=4)


class NBeats(nn.Module):
    """Blocks that explain what is left of a series, and forecast it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
                              nn.Linear(16, 16))
                for _ in range(4)
            ]
        )  # fmt: skip

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        left, forecast = series[:, :12], torch.zeros_like(series[:, 12:])
        for block in self.blocks:
            found = block(left)
            left, forecast = left - found[:, :12], forecast + found[:, 12:]
        return (forecast - series[:, 12:]).square().mean()


def forecaster(kind: str, **sizes: Any) -> Callable[[], Example]:
    def build() -> Example:
        name = {"patchtst": "PatchTST", "patchtsmixer": "PatchTSMixer"}[kind]
        config = getattr(transformers, f"{name}Config")(
            context_length=16, prediction_length=4, num_input_channels=2, patch_length=4,
            patch_stride=4, d_model=16, dropout=0.0, head_dropout=0.0, **sizes,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForPrediction")(config)

        def step(past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
            return model(past_values=past, future_values=future).loss

        return Example(
            model, step, lambda n, size: (torch.randn(n, 16, 2), torch.randn(n, 4, 2)), rows=4
        )

    return build


def informer() -> Example:
    """Its loss is the likelihood of a distribution from torch.distributions."""
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1,
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )  # fmt: skip
    model = transformers.TimeSeriesTransformerForPrediction(config)

    def step(past: torch.Tensor, times: torch.Tensor, future: torch.Tensor, later: torch.Tensor):
        return model(
            past_values=past, past_time_features=times, past_observed_mask=torch.ones_like(past),
            future_values=future, future_time_features=later,
        ).loss  # fmt: skip

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        past, future = torch.randn(rows, 10), torch.randn(rows, 4)
        return past, torch.randn(rows, 10, 1), future, torch.randn(rows, 4, 1)

    return Example(model, step, draw)


fm, MLP = torchfm.model, (16, 16)
MODELS = {
    "fnn": clicks(lambda: fm.fnn.FactorizationSupportedNeuralNetworkModel(FIELDS, 8, MLP, 0.0)),
    "wide_and_deep": clicks(lambda: fm.wd.WideAndDeepModel(FIELDS, 8, MLP, 0.0)),
    "deep_fm": clicks(lambda: fm.dfm.DeepFactorizationMachineModel(FIELDS, 8, MLP, 0.0)),
    "xdeep_fm": clicks(lambda: fm.xdfm.ExtremeDeepFactorizationMachineModel(
        FIELDS, 8, (16, 16), 0.0, (8, 8))),
    "dcn": clicks(lambda: fm.dcn.DeepCrossNetworkModel(FIELDS, 8, 2, (16, 16), 0.0)),
    "pnn": clicks(lambda: fm.pnn.ProductNeuralNetworkModel(FIELDS, 8, MLP, 0.0)),
    "nfm": clicks(lambda: fm.nfm.NeuralFactorizationMachineModel(FIELDS, 8, (16, 16), (0.0, 0.0))),
    "afm": clicks(lambda: fm.afm.AttentionalFactorizationMachineModel(FIELDS, 8, 8, (0.0, 0.0))),
    "auto_int": clicks(lambda: fm.afi.AutomaticFeatureInteractionModel(
        FIELDS, 8, 8, 2, 2, (16, 16), (0.0, 0.0, 0.0))),
    "afn": clicks(lambda: fm.afn.AdaptiveFactorizationNetwork(
        FIELDS, 8, 8, (16, 16), (0.0, 0.0))),
    "dlrm": dlrm(False),
    "dlrm_sparse": dlrm(True),
    "two_towers": towers,
    "sasrec": sasrec,
    "mmoe": numbers(Mmoe, 8),
    "tab_transformer": tab_transformer,
    "nbeats": numbers(NBeats, 16),
    "patchtst": forecaster("patchtst", num_hidden_layers=3, num_attention_heads=2, ffn_dim=32,
                           attention_dropout=0.0),
    "patchtsmixer": forecaster("patchtsmixer", num_layers=3),
    "time_series_transformer": informer,
}  # fmt: skip
