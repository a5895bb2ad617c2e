"""One tiny model for each cause for which models were refused: eager's numbers on two stages, or an
error with the line. `benchmarks/coverage.py` has other people's models by the hundred."""

import functools
import logging
import random
import re
import threading
import warnings

import numpy
import pytest
import torch
from share import some
from torch import nn
from torch.utils.checkpoint import checkpoint

import pfeife
from pfeife.testing import assert_same, eager_accumulation

transformers = pytest.importorskip("transformers")
log = logging.getLogger("a library's")
WORDS = 20


class Net(nn.Module):
    """Two layers, and between them what a function makes of the net and a value."""

    def __init__(self, inside):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inside = inside

    def forward(self, x):
        return self.last(self.inside(self, self.first(x).tanh()).tanh()).square().mean()


def logs(net, x):
    log.warning("a model that says something at every call")
    return x


def warns(net, x):
    warnings.warn("a model that warns", UserWarning, stacklevel=2)
    return x


def prints(net, x):
    print("a model that prints its shape", x.shape)
    return x


def item(net, x):
    return x * x.detach().abs().max().item()


def branches(net, x):
    return x * 2 if x.detach().sum() > 1e9 else x


def experts(net, x):
    """Every row goes to the expert with the highest score; none are lost."""
    which, out = x[:, :2].argmax(-1), torch.zeros_like(x)
    for index, weight in enumerate((net.last.weight, net.first.weight)):
        rows = (which == index).nonzero()[:, 0]
        out = out.index_add(0, rows, x[rows] @ weight)
    return out


def masked(net, x):
    return x + x[x > 0].sum() / 100


def rematerialised(net, x):
    return checkpoint(lambda y: (y @ net.first.weight).relu(), x, use_reentrant=False)


def fourier(net, x):
    modes = torch.fft.rfft(x)
    return torch.fft.irfft(modes * torch.complex(modes.real, -modes.imag), n=4)


def python_random(net, x):
    return x if random.random() < 0.5 else 2 * x


def numpy_random(net, x):
    return x * float(numpy.random.rand())


def through_numpy(net, x):
    order = numpy.argsort(x.detach().numpy()[:, 0])
    return x[torch.from_numpy(order)]


class Derived(nn.Module):
    """Of a function's derivatives; the last bias has no influence on them, and is read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        def value(row):
            return self.last(self.layers(row))[0]

        return torch.func.vmap(torch.func.jacrev(value))(x).square().mean()


def inner_gradient(net, x):
    y = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net.last(y).square().sum(), y, create_graph=True)
    return x + slope


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def custom(net, x):
    return Twice.apply(x)


def number_of_edges(net, x):
    """As graph nets add loops where a node has none: a number that depends on the data."""
    edges = (x.detach() > 0).nonzero().T
    if edges.numel() > 0:
        return x + torch.zeros_like(x).index_put(tuple(edges), x[tuple(edges)], accumulate=True)
    return x


class Prepared(nn.Module):
    """Prepares itself at its first call, behind a lock, and keeps statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.lock, self.scale = threading.Lock(), None

    def forward(self, x):
        with self.lock:
            if self.scale is None:
                self.scale = 2.0
        return self.last(self.norm(self.first(x)) * self.scale).square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind, **more):
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.layers = kind(4, 4, 2, batch_first=True, **more)
        self.head = nn.Linear(4, 4)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens))[0]).square().mean()


class Packed(Recurrent):
    def forward(self, tokens):
        lengths = tokens[:, 0] % 4 + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.layers(packed)[1][0]).square().mean()


class Transcriber(nn.Module):
    """CTC, whose targets are of various lengths."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 5)

    def forward(self, tokens):
        found = self.head(self.words(tokens).tanh()).log_softmax(-1).transpose(0, 1)
        target = tokens[:, :2] % 4 + 1
        full = torch.full((len(tokens),), tokens.shape[1])
        return nn.functional.ctc_loss(found, target, full, full - full + 2)


class Quantized(nn.Module):
    """The moving average of its codes is state."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(3, 4))

    def forward(self, x):
        x = self.first(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        with torch.no_grad():
            hits = nn.functional.one_hot(nearest, 3).float()
            self.codes.lerp_(hits.T @ x / (hits.sum(0)[:, None] + 1), 0.1)
        return self.last(x + (self.codes[nearest] - x).detach()).square().mean()


def gpt2():
    return language(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


class Language(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def language(config):
    return Language(transformers.AutoModelForCausalLM.from_config(config))


class Heard(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.Wav2Vec2Config(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
            conv_dim=(4,), conv_stride=(4,), conv_kernel=(8,), num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, num_feat_extract_layers=1, feat_proj_dropout=0.0,
            hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, layerdrop=0.0,
            mask_time_prob=0.0, apply_spec_augment=False,
        )  # fmt: skip
        self.model = transformers.Wav2Vec2Model(config)

    def forward(self, sound):
        return self.model(sound).last_hidden_state[..., 0].square().mean()


def rows(*shape):
    return lambda: torch.randn(6, *shape)


def tokens(length=5):
    return lambda: torch.randint(2, WORDS, (6, length))


LINE = r"\.py\W+line \d+|\.py:\d+"
MODELS = {
    "logs": (functools.partial(Net, logs), rows(4)),
    "warns": (functools.partial(Net, warns), rows(4)),
    "prints": (functools.partial(Net, prints), rows(4)),
    "a number of the data": (functools.partial(Net, item), rows(4)),
    "experts by nonzero": (functools.partial(Net, experts), rows(4)),
    "a mask": (functools.partial(Net, masked), rows(4)),
    "rematerialised": (functools.partial(Net, rematerialised), rows(4)),
    "complex": (functools.partial(Net, fourier), rows(4)),
    "custom function": (functools.partial(Net, custom), rows(4)),
    "derivatives by torch.func": (Derived, rows(4)),
    "a lock and statistics": (Prepared, rows(4)),
    "lstm": (functools.partial(Recurrent, nn.LSTM), tokens()),
    "codes": (Quantized, rows(4)),
    "gpt2": (gpt2, tokens()),
}
REFUSED = {
    "python's random": (functools.partial(Net, python_random), rows(4)),
    "numpy's random": (functools.partial(Net, numpy_random), rows(4)),
    "a branch on data": (functools.partial(Net, branches), rows(4)),
    "through numpy": (functools.partial(Net, through_numpy), rows(4)),
    "a number of edges": (functools.partial(Net, number_of_edges), rows(4)),
    "derivatives by autograd": (functools.partial(Net, inner_gradient), rows(4)),
    "wav2vec2": (Heard, rows(40)),
    "packed": (functools.partial(Packed, nn.LSTM), tokens()),
    "ctc": (Transcriber, tokens()),
}


def beside_eager(build, draw):
    """Two steps as a pipeline, each beside eager from the same state."""
    torch.manual_seed(0)
    model = build().train()
    twin = build().train()
    step = pfeife.compile(lambda x: model(x), microbatches=3, stages=2)
    for seed in range(2):
        torch.manual_seed(seed)
        x = draw()
        twin.load_state_dict(model.state_dict())
        expected = eager_accumulation(twin, twin, [(one,) for one in x.chunk(3)])
        before = {name: value.clone() for name, value in model.named_buffers()}
        model.zero_grad()
        loss = step(x)
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found = {n: v for n, v in model.named_buffers() if not torch.equal(v, before[n])}
        # Some libraries ask whether they are compiled, and take another way to the same numbers.
        assert_same(expected, pfeife.Result(loss.detach(), ({},) * 3, gradients, found), None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(MODELS))
def test_eagers_numbers(name):
    beside_eager(*MODELS[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name):
    """Or right: never other numbers, and never a crash."""
    try:
        beside_eager(*REFUSED[name])
    except ValueError as error:
        assert re.search(LINE, str(error)), error
