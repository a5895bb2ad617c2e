"""Ways of learning: momentum encoders, steps with gradients inside, actors and critics."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from coverage_models.example import Example


def perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def encoder() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
    )  # fmt: skip


def two_images(rows: int, size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 3, size, size), torch.randn(rows, 3, size, size)


def numbers(*widths: int) -> Callable[[int, int], tuple[torch.Tensor, ...]]:
    return lambda rows, _: tuple(torch.randn(rows, width) for width in widths)


class Contrast(nn.Module):
    """A queue of negatives by an encoder that follows the other one: MoCo, with its pointer left
    out. Its weights are written by `.data`, as MoCo does, or in place."""

    def __init__(self, by_data: bool):
        super().__init__()
        self.by_data, self.query = by_data, encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 12), dim=0))

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.query.parameters(), self.key.parameters(), strict=True)
        for one, key in pairs:
            if self.by_data:
                key.data = key.data * 0.9 + one.data * 0.1
            else:
                key.mul_(0.9).add_(one, alpha=0.1)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            self.follow()
            key = F.normalize(self.key(other), dim=1)
        positive = (query * key).sum(1, keepdim=True)
        logits = torch.cat([positive, query @ self.queue.clone().detach()], 1) / 0.07
        with torch.no_grad():
            self.queue.copy_(torch.cat([key.T, self.queue], 1)[:, :12])
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def contrast(by_data: bool) -> Callable[[], Example]:
    def build() -> Example:
        model = Contrast(by_data)
        return Example(model, model, two_images, (16, 24))

    return build


def byol() -> Example:
    online, guess = encoder(), perceptron(8, 16, 8)
    target = copy.deepcopy(online).requires_grad_(False)

    def step(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            ends = target(other), target(one)
        found = guess(online(one)), guess(online(other))
        pairs = zip(found, ends, strict=True)
        return torch.stack([2 - 2 * F.cosine_similarity(a, b) for a, b in pairs]).mean()

    return Example(nn.ModuleList([online, guess, target]), step, two_images, (16, 24), rows=4)


def meta_learning() -> Example:
    """A step of gradient descent inside of the step, differentiated (MAML)."""
    net = perceptron(4, 16, 16, 1)

    def step(*args: torch.Tensor) -> torch.Tensor:
        x, y, later_x, later_y = args
        weights = dict(net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(net, weights, (x,)), y)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        pairs = zip(weights.items(), gradients, strict=True)
        weights = {name: one - 0.1 * gradient for (name, one), gradient in pairs}
        return F.mse_loss(torch.func.functional_call(net, weights, (later_x,)), later_y)

    return Example(net, step, numbers(4, 1, 4, 1))


def per_sample_gradients() -> Example:
    """The norms of every row's gradients, as differential privacy clips them."""
    net = perceptron(6, 16, 8, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss(weights: Any, one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            logits = torch.func.functional_call(net, weights, (one[None],))
            return F.cross_entropy(logits, label[None])

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        found = each(dict(net.named_parameters()), x, y)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in found.values()], 1)
        return norms.square().sum(1).mean() + F.cross_entropy(net(x), y)

    draw = numbers(6)
    return Example(net, step, lambda n, size: (*draw(n, size), torch.randint(3, (n,))))


def actor_and_critic() -> Example:
    """Soft actor and critic, with the noise as an argument."""
    actor, critic = perceptron(4, 16, 16, 4), perceptron(6, 16, 16, 1)
    target = copy.deepcopy(critic).requires_grad_(False)

    def policy(state: torch.Tensor) -> torch.distributions.Normal:
        mean, deviation = actor(state).chunk(2, -1)
        return torch.distributions.Normal(mean, deviation.tanh().exp())

    def step(*args: torch.Tensor) -> torch.Tensor:
        state, action, reward, following, noise = args
        with torch.no_grad():
            later = policy(following)
            other = torch.cat([following, torch.tanh(later.loc + later.scale * noise)], -1)
            aim = reward + 0.9 * target(other)
        found = policy(state)
        drawn = found.loc + found.scale * noise
        value = critic(torch.cat([state, torch.tanh(drawn)], -1))
        gain = 0.1 * found.log_prob(drawn).sum(-1, keepdim=True) - value
        return F.mse_loss(critic(torch.cat([state, action], -1)), aim) + gain.mean()

    model = nn.ModuleList([actor, critic, target])
    return Example(model, step, numbers(4, 2, 1, 4, 2))


def penalised_gan() -> Example:
    """A critic whose gradients have norm 1 (WGAN-GP, StarGAN)."""
    maker = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.InstanceNorm2d(8), nn.ReLU(True),
                          nn.Conv2d(8, 3, 3, 1, 1), nn.Tanh())  # fmt: skip
    critic = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.01), nn.Conv2d(8, 1, 3, 1, 1))

    def step(x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        made = maker(x)
        between = (share * x + (1 - share) * made.detach()).requires_grad_(True)
        score = critic(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return critic(made).mean() - critic(x).mean() + 10 * penalty

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 3, size, size), torch.rand(rows, 1, 1, 1)

    return Example(nn.ModuleList([maker, critic]), step, draw, (16, 24), rows=3)


def inside_algorithm() -> Example:
    """The score of all trees over a sentence, in a chart that is filled in place."""
    words, rules = nn.Embedding(20, 16), nn.Parameter(torch.randn(3, 3, 3) * 0.1)
    tags = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model = nn.ModuleList([words, tags])
    model.rules = rules

    def step(tokens: torch.Tensor) -> torch.Tensor:
        scores, length = tags(words(tokens)), tokens.shape[1]
        chart = torch.full((len(tokens), length, length, 3), -1e4)
        for i in range(length):
            chart[:, i, i] = scores[:, i]
        for width in range(1, length):
            for i in range(length - width):
                parts = [
                    chart[:, i, k][:, None, :, None] + chart[:, k + 1, i + width][:, None, None]
                    for k in range(i, i + width)
                ]
                every = torch.stack([part + rules for part in parts]).logsumexp(0)
                chart[:, i, i + width] = every.flatten(2).logsumexp(-1)
        return -chart[:, 0, -1].logsumexp(-1).mean()

    return Example(model, step, lambda n, size: (torch.randint(20, (n, size)),), (4, 5))


def drawn_without_gradients() -> Example:
    """Noise from a distribution, which torch draws under no_grad. Nothing depends on its values."""
    net = perceptron(6, 16, 16, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        noise = torch.distributions.Uniform(0.0, 1.0).sample(x.shape)
        return net(x + 0 * noise).square().mean()

    return Example(net, step, numbers(6))


def quantised() -> Example:
    """Weights and activations rounded, with gradients of their own (torch.autograd.Function)."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, step)
            return (x / step).round().clamp(-8, 7) * step

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, step = ctx.saved_tensors
            scaled = x / step
            return gradient * (scaled.abs() < 8), (gradient * (scaled.round() - scaled)).sum()

    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    steps = nn.ParameterList([nn.Parameter(torch.tensor(0.1)) for _ in layers])

    def step(x: torch.Tensor) -> torch.Tensor:
        for layer, size in zip(layers, steps, strict=True):
            weight = Rounded.apply(layer.weight, size)
            x = F.linear(Rounded.apply(x, size), weight, layer.bias).tanh()
        return x.square().mean()

    return Example(nn.ModuleList([layers, steps]), step, numbers(8), rows=3)


MODELS = {
    "contrast_by_data": contrast(True),
    "contrast": contrast(False),
    "byol": byol,
    "meta_learning": meta_learning,
    "per_sample_gradients": per_sample_gradients,
    "actor_and_critic": actor_and_critic,
    "penalised_gan": penalised_gan,
    "inside_algorithm": inside_algorithm,
    "drawn_without_gradients": drawn_without_gradients,
    "quantised": quantised,
}
