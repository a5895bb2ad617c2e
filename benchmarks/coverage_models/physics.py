"""Physics and mathematics: operators, equations, equivariant nets, solvers."""

from collections.abc import Callable

import torch
from e3nn import o3
from torch import nn
from torchdiffeq import odeint

from coverage_models.example import Example
from coverage_models.small import squared


class Spectral(nn.Module):
    """A Fourier layer: products of complex modes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 4, dtype=torch.cfloat) / 8)
        self.beside = nn.Conv1d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(x)
        found = torch.zeros_like(modes)
        found[..., :4] = torch.einsum("bik,iok->bok", modes[..., :4], self.weight)
        return nn.functional.gelu(torch.fft.irfft(found, n=x.shape[-1]) + self.beside(x))


def fourier_operator() -> Example:
    model = nn.Sequential(
        nn.Conv1d(2, 8, 1), Spectral(), Spectral(), Spectral(), nn.Conv1d(8, 1, 1)
    )
    return squared(model, lambda rows, size: (torch.randn(rows, 2, size),), sizes=(16, 24))


def deep_operator() -> Example:
    branch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
    trunk = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

    def step(field: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bk,bpk->bp", branch(field), trunk(places)).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 8), torch.rand(rows, size, 2)

    return Example(nn.ModuleList([branch, trunk]), step, draw, (6, 8))


def tanh_net(ins: int = 2, outs: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(ins, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, outs),
    )  # fmt: skip


def informed() -> Example:
    """A physics-informed net: its loss has derivatives by the places, by autograd in the step."""
    model = tanh_net()

    def step(places: torch.Tensor) -> torch.Tensor:
        places = places.detach().requires_grad_()
        found = model(places)
        (first,) = torch.autograd.grad(found.sum(), places, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), places, create_graph=True)
        return (first[:, 1] + found[:, 0] * first[:, 0] - 0.01 * second[:, 0]).square().mean()

    return Example(model, step, lambda rows, size: (torch.rand(rows, 2),), rows=4)


def informed_by_func() -> Example:
    """The same by torch.func, a row at a time."""
    model = tanh_net()

    def value(place: torch.Tensor) -> torch.Tensor:
        return model(place)[0]

    def step(places: torch.Tensor) -> torch.Tensor:
        first = torch.func.vmap(torch.func.jacrev(value))(places)
        return (first[:, 1] - first[:, 0].square()).square().mean()

    return Example(model, step, lambda rows, size: (torch.rand(rows, 2),), rows=4)


def hamiltonian() -> Example:
    model = tanh_net(4)

    def step(state: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(state).sum(), state, create_graph=True)
        found = torch.cat([slope[:, 2:], -slope[:, :2]], 1)
        return (found - change).square().mean()

    return Example(model, step, lambda n, size: (torch.randn(n, 4), torch.randn(n, 4)), rows=4)


def neural_ode(method: str) -> Callable[[], Example]:
    def build() -> Example:
        model = tanh_net(2, 2)
        times = torch.linspace(0.0, 1.0, 4)

        def step(start: torch.Tensor) -> torch.Tensor:
            return odeint(lambda t, y: model(y), start, times, method=method).square().mean()

        return Example(model, step, lambda rows, size: (torch.randn(rows, 2),), rows=4)

    return build


def equivariant() -> Example:
    """e3nn: tensor products with spherical harmonics of edges between all pairs."""
    mids = o3.Irreps("4x0e + 2x1o")
    sphere = o3.Irreps.spherical_harmonics(1)
    first = o3.Linear("4x0e", mids)
    layers = nn.ModuleList([o3.FullyConnectedTensorProduct(mids, sphere, mids) for _ in range(3)])
    last = o3.Linear(mids, "1x0e")
    model = nn.ModuleList([first, layers, last])

    def step(kinds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        gaps = places[:, :, None] - places[:, None]
        edges = o3.spherical_harmonics(sphere, gaps, normalize=False, normalization="component")
        x = first(kinds)
        for layer in layers:
            every = x[:, None].expand(-1, x.shape[1], -1, -1)
            x = x + layer(every, edges).mean(2)
        return last(x).sum(1).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, size, 4), torch.randn(rows, size, 3)

    return Example(model, step, draw, (4, 5))


class Egnn(nn.Module):
    """An equivariant layer without harmonics: distances, and places that move."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(17, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.move = nn.Linear(16, 1)
        self.node = nn.Sequential(nn.Linear(24, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gaps = x[:, :, None] - x[:, None]
        far = gaps.square().sum(-1, keepdim=True)
        own = h[:, :, None].expand(-1, -1, h.shape[1], -1)
        message = self.edge(torch.cat([own, own.transpose(1, 2), far], -1))
        x = x + (gaps * self.move(message)).mean(2)
        return h + self.node(torch.cat([h, message.sum(2)], -1)), x


def egnn() -> Example:
    layers = nn.ModuleList([Egnn() for _ in range(3)])

    def step(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            h, x = layer(h, x)
        return h.square().mean() + x.square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, size, 8), torch.randn(rows, size, 3)

    return Example(layers, step, draw, (4, 5))


class Coupling(nn.Module):
    """A step of a flow: half of the values are changed by what the other half says."""

    def __init__(self, flipped: bool):
        super().__init__()
        self.net, self.flipped = tanh_net(2, 4), flipped

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.flip(-1).chunk(2, -1) if self.flipped else x.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        scale = scale.tanh()
        return torch.cat([a, b * scale.exp() + shift], -1), scale.sum(-1)


def flow() -> Example:
    model = nn.ModuleList([Coupling(bool(i % 2)) for i in range(4)])
    base = torch.distributions.Normal(0.0, 1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(len(x))
        for layer in model:
            x, volume = layer(x)
            total = total + volume
        return -(base.log_prob(x).sum(-1) + total).mean()

    return Example(model, step, lambda rows, size: (torch.randn(rows, 4),), rows=4)


class Equilibrium(nn.Module):
    """A deep equilibrium: iterated until it stands still, which a number from data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        nn.init.orthogonal_(self.inner.weight, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        for _ in range(20):
            new = (self.inner(state) + self.outer(x)).tanh()
            if (new - state).norm().item() < 1e-2:
                break
            state = new
        return self.head(new).square().mean()


def equilibrium() -> Example:
    model = Equilibrium()
    return Example(model, model, lambda rows, size: (torch.randn(rows, 8),), rows=4)


def implicit_field() -> Example:
    """A radiance field: sines of places, and densities added along rays."""
    model = tanh_net(18, 4)
    scales = 2.0 ** torch.arange(3)

    def step(begin: torch.Tensor, way: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
        far = torch.linspace(0.5, 2.0, 8)
        places = begin[:, None] + far[:, None] * way[:, None]
        angles = (places[..., None] * scales).flatten(-2)
        found = model(torch.cat([angles.sin(), angles.cos()], -1))
        alpha = 1 - torch.exp(-found[..., 3].relu() * 0.2)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return (
            ((alpha * left)[..., None] * found[..., :3].sigmoid())
            .sum(1)
            .sub(colour)
            .square()
            .mean()
        )

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 3), torch.randn(rows, 3), torch.rand(rows, 3)

    return Example(model, step, draw, rows=4)


def solved() -> Example:
    """Linear algebra within: a ridge regression whose features are learned."""
    model = tanh_net(3, 4)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = model(x)
        gram = features.mT @ features + 0.1 * torch.eye(4)
        weights = torch.linalg.solve(gram, features.mT @ y[..., None])
        return (features @ weights - y[..., None]).square().mean() + torch.logdet(gram).mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, size, 3), torch.randn(rows, size)

    return Example(model, step, draw, (6, 8))


def rigid() -> Example:
    """Rotations by a singular value decomposition (Kabsch)."""
    model = tanh_net(3, 3)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = model(a)
        u, _, v = torch.linalg.svd(found.mT @ b)
        return (found @ (u @ v) - b).square().mean()

    return Example(model, step, lambda n, size: (torch.randn(n, size, 3), torch.randn(n, size, 3)))


MODELS = {
    "fourier_operator": fourier_operator,
    "deep_operator": deep_operator,
    "informed": informed,
    "informed_by_func": informed_by_func,
    "hamiltonian": hamiltonian,
    "neural_ode": neural_ode("rk4"),
    "neural_ode_adaptive": neural_ode("dopri5"),
    "equivariant": equivariant,
    "egnn": egnn,
    "flow": flow,
    "equilibrium": equilibrium,
    "radiance_field": implicit_field,
    "ridge": solved,
    "kabsch": rigid,
}
