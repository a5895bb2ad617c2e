"""What people write in training loops: each of these functions is a script as it would be on one
device, given what compiles a step, the batches, and somebody to look at its numbers (`beside.py`).

`tests/distributed/scripts.py` runs some of them on ranks, `benchmarks/loop_table.py` all of them.
"""

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler, swa_utils
from torch.utils._pytree import tree_map_only

import pfeife

ELSEWHERE = "state of other ranks: "
ON_ONE = "has been written to"
TOO_SMALL = "clusters to cut between"  # for the stages of a cell
STATISTICS = "a copy of trained parameters is made from pfeife.full_state_dict"  # of two replicas
LIMIT = 1e-9  # in units of the largest value of a tensor


@attrs.frozen
class Script:
    """One of them. On ranks it may end with `refused`, words that are in the error; `small` says
    that a model of its own may be too small for more than two stages. Where a sum is re-associated
    (`tied`: that of the model's weights, too), differences in float64 are at most `limit`."""

    name: str
    run: Callable[[Any], None]
    refused: str = ""
    tied: bool = False
    limit: float = LIMIT
    small: bool = False


SCRIPTS: dict[str, Script] = {}


def script(refused: str = "", **more: Any) -> Callable:
    """Makes a script of a function."""

    def note(run: Callable[[Any], None]) -> Callable[[Any], None]:
        SCRIPTS[run.__name__] = Script(run.__name__, run, refused, **more)
        return run

    return note


WIDTH = 6


class Net(nn.Module):
    """Layers with statistics between them; if `tied`, the last one has the weight of the first."""

    def __init__(self, tied: bool = False, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x)).tanh()


def loss_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, t: F.mse_loss(model(x), t)


def layers(run: Any, *widths: int) -> nn.Module:
    """Another model than the script's own."""
    torch.manual_seed(len(widths))
    found = [one for pair in pairwise(widths) for one in (nn.Linear(*pair), nn.Tanh())]
    return run.known(nn.Sequential(*found[:-1]).to(run.dtype))


def sgd(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.05, "momentum": 0.9} | more))


def train(
    run: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    between: Callable[[int, torch.Tensor], object] = lambda at, loss: None,
    after: Callable[[int, torch.Tensor], object] = lambda at, loss: None,
    step: Callable[..., torch.Tensor] | None = None,
) -> None:
    """The usual loop, with something between backward and the optimizer's step, or after that."""
    step = step or run.compile(loss_of(model))
    for at, (x, t) in enumerate(run.batches()):
        loss = step(x, t)
        loss.backward()
        between(at, loss)
        run.see(loss, model)
        optimizer.step()
        after(at, loss)
        optimizer.zero_grad()
    run.end(model, optimizer)


@script()
def momentum(run):
    model = run.model()
    train(run, model, sgd(model, nesterov=True))


@script(tied=True)
def tied_weights(run):
    model = run.model()
    train(run, model, sgd(model))


@script()
def adamw(run):
    model = run.model()
    train(run, model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True))


@script()
def loss_outside(run):
    model = run.model()
    forward, optimizer = run.compile(lambda x: model(x)), sgd(model)
    for x, t in run.batches():
        loss = F.mse_loss(forward(x), t)
        run.turn(loss, model, optimizer)
    run.end(model, optimizer)


@script()
def clip_grad_norm(run):
    model = run.model()
    kinds = (2.0, float("inf"), 1.0)

    def clip(at, loss):
        run.note(utils.clip_grad_norm_(model.parameters(), 0.1, kinds[at % 3]))

    train(run, model, sgd(model), clip)


@script(tied=True)
def clip_grad_norm_of_tied_weights(run):
    model = run.model()
    clip = lambda at, loss: run.note(utils.clip_grad_norm_(model.parameters(), 0.1))  # noqa: E731
    train(run, model, sgd(model), clip)


@script()
def clip_grad_norm_of_pfeife(run):
    model = run.model()
    clip = lambda at, loss: run.note(pfeife.clip_grad_norm_(model.parameters(), 0.1))  # noqa: E731
    train(run, model, sgd(model), clip)


@script()
def total_norm_and_clip_with_it(run):
    model = run.model()

    def clip(at, loss):
        total = utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        run.note(total)
        utils.clip_grads_with_norm_(model.parameters(), 0.1, total)

    train(run, model, sgd(model), clip)


@script()
def clip_grad_value(run):
    model = run.model()
    train(run, model, sgd(model), lambda at, _: utils.clip_grad_value_(model.parameters(), 0.01))


@script()
def grad_scaler(run):
    """One of the losses overflows, and its step is left out."""
    model = run.model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        loss = step(x, t)
        scaler.scale(loss * (float("inf") if at == 7 else 1.0)).backward()
        scaler.unscale_(optimizer)
        run.note(utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        run.note(torch.tensor(scaler.get_scale()))
        optimizer.zero_grad()
    run.end(model, optimizer)


@script()
def zero_grad_of_all_kinds(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        loss = step(x, t)
        if at % 2:  # between forward and backward
            optimizer.zero_grad(set_to_none=at % 4 == 1)
        loss.backward()
        run.see(loss, model)
        optimizer.step()
        if at % 2 == 0:
            continue
        model.zero_grad(set_to_none=at % 3 == 0)
        for p in model.parameters():
            p.grad = None
    run.end(model, optimizer)


@script()
def gradients_kept_as_zeros(run):
    """Momentum moves what has a gradient of zero."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model, weight_decay=0.1)
    for at, (x, t) in enumerate(run.batches()):
        if at % 4:
            loss = step(x, t)
            loss.backward()
            run.see(loss, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    run.end(model, optimizer)


@script()
def accumulation_over_calls(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        loss = step(x, t) / 4
        loss.backward()
        run.see(loss, model)
        if at % 4 == 3:
            run.note(utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
    run.end(model, optimizer)


@script()
def parameter_groups(run):
    """Weight decay by name, another rate of the last layer, a group that is added later."""
    model = run.model()
    named = dict(model.named_parameters())
    last = [named.pop(f"last.{name}") for name in ("weight", "bias")]
    plain = [p for name, p in named.items() if "bias" in name or "norm" in name]
    decayed = [p for name, p in named.items() if "bias" not in name and "norm" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

    def after(at, loss):
        if at == 9:
            optimizer.add_param_group({"params": last, "lr": 0.1})
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    train(run, model, optimizer, after=after)


@script()
def schedulers(run):
    model = run.model()
    optimizer = sgd(model)
    one = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    other = lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    def after(at, loss):
        one.step() if at < 10 else other.step(loss.item())
        run.note(torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))

    train(run, model, optimizer, after=after)


@script()
def two_optimizers(run):
    model = run.model()
    step = run.compile(loss_of(model))
    head = [*model.blocks[2:].parameters(), *model.last.parameters()]
    others = [p for p in model.parameters() if all(p is not one for one in head)]
    both = torch.optim.AdamW(head, lr=0.01), torch.optim.SGD(others, lr=0.05)
    for at, (x, t) in enumerate(run.batches()):
        loss = step(x, t)
        loss.backward()
        run.see(loss, model)
        both[0].step()
        if at % 2:
            both[1].step()
        for one in both:
            one.zero_grad()
    run.end(model, *both)


@script()
def an_optimizer_made_anew(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        if at == 10:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)


@script()
def a_compiled_optimizer(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), torch.optim.AdamW(model.parameters(), lr=0.01)
    update = torch.compile(optimizer.step, backend="eager")
    for x, t in run.batches():
        loss = step(x, t)
        loss.backward()
        run.see(loss, model)
        update()
        optimizer.zero_grad()
    run.end(model, optimizer)


class Own(torch.optim.Optimizer):
    """An optimizer that somebody has written."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.01):
        super().__init__(parameters, {"lr": lr})

    def trained(self) -> Iterator[tuple[nn.Parameter, float]]:
        """What has gradients, with its rate."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield p, group["lr"]


class Signs(Own):
    """One with state of its own, and a norm of each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for p, lr in self.trained():
            state = self.state[p]
            if not state:
                state["average"], state["norm"] = torch.zeros_like(p), torch.zeros(())
            state["average"].lerp_(p.grad, 0.1)
            state["norm"] = p.norm() / p.grad.norm().add(1e-3)
            p.add_(state["average"].tanh() * state["norm"], alpha=-lr)


@script()
def an_optimizer_of_ones_own(run):
    model = run.model()
    train(run, model, Signs(model.parameters()))


class Normed(Own):
    """One that divides by the norm of all gradients, as Lamb does."""

    @torch.no_grad()
    def step(self, closure=None):
        total = sum(p.grad.pow(2).sum() for p, _ in self.trained()) ** 0.5
        for p, lr in self.trained():
            p.sub_(p.grad / (total + 1e-6), alpha=lr)


@script("Normed.step() computes something of several parameters")
def an_optimizer_with_a_norm_of_all(run):
    model = run.model()
    train(run, model, Normed(model.parameters()))


class Noisy(Own):
    """One that adds noise, as in Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        for p, lr in self.trained():
            p.sub_(p.grad + torch.randn_like(p), alpha=lr)


@script("Noisy.step() draws random numbers")
def an_optimizer_that_draws(run):
    model = run.model()
    train(run, model, Noisy(model.parameters()))


class Filled(Own):
    """One that takes zeros where there is no gradient, and keeps a count of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters)
        self.state["all"] = {"steps": 0}

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                state = self.state[p]
                state["moved"] = state.get("moved", 0.0) * 0.9 + gradient
                p.sub_(state["moved"], alpha=group["lr"])


@script()
def an_optimizer_with_state_for_all(run):
    model = run.model()
    optimizer = Filled(model.parameters())
    train(run, model, optimizer)


@script("with other settings than on rank")
def a_schedule_on_rank_zero(run):
    """As is right for what is logged, but not for this."""
    model = run.model()
    optimizer = sgd(model)
    schedule = lr_scheduler.StepLR(optimizer, 3)
    train(run, model, optimizer, after=lambda at, loss: run.rank or schedule.step())


@script("gradient", limit=1e-3)  # of them all, or of those of another rank
def lbfgs(run):
    model = run.model()
    step, optimizer = (
        run.compile(loss_of(model)),
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    )
    for x, t in run.batches():

        def closure(x=x, t=t):
            optimizer.zero_grad()
            loss = step(x, t)
            loss.backward()
            return loss

        run.note(optimizer.step(closure).detach())
    run.end(model)


@script()
def a_closure(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for x, t in run.batches():

        def closure(x=x, t=t):
            optimizer.zero_grad()
            loss = step(x, t)
            loss.backward()
            return loss

        run.see(optimizer.step(closure), model)
    run.end(model, optimizer)


@script()
def updates_by_hand(run):
    """Stochastic gradient descent as in a first lesson, with momentum."""
    model = run.model()
    step, moved = run.compile(loss_of(model)), {}
    for x, t in run.batches():
        loss = step(x, t)
        loss.backward()
        run.see(loss, model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                moved[name] = moved.get(name, 0.0) * 0.9 + p.grad
                p -= 0.05 * moved[name]
                p.grad.zero_()
    run.end(model)


@script()
def parameters_assigned(run):
    """Through `data`, by which torch asks nobody."""
    model = run.model()
    step = run.compile(loss_of(model))
    for x, t in run.batches():
        loss = step(x, t)
        loss.backward()
        run.see(loss, model)
        for p in model.parameters():
            p.data = p.data - 0.05 * p.grad
            p.grad = None
    run.end(model)


@script()
def sharpness_aware(run):
    """Two backwards a step, between them a move along the gradients."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for x, t in run.batches():
        loss = step(x, t)
        loss.backward()
        run.see(loss, model)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        step(x, t).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


@script()
def gradients_changed_by_hand(run):
    model = run.model()

    def change(at, loss):
        grads = [p.grad for p in model.parameters()]
        if at % 4 == 0:
            for p in model.parameters():
                p.grad *= 0.5
        elif at % 4 == 1:
            torch._foreach_mul_(grads, 0.5)
        elif at % 4 == 2:
            for p in model.parameters():
                p.grad = p.grad.sign() * 0.01 + 0.1 * p.grad
        else:
            for p in model.parameters():
                p.grad.data.div_(p.grad.data.norm() + 1.0)

    train(run, model, sgd(model), change)


@script()
def gradient_noise(run):
    model = run.model()

    def change(at, loss):
        for p in model.parameters():
            noise = torch.randn_like(p.grad) if at % 2 else torch.randn(p.grad.shape)
            p.grad.add_(noise.to(p.grad.dtype), alpha=0.01)

    train(run, model, sgd(model), change)


@script()
def gradients_centred_and_clipped_by_rows(run):
    """As gradient centralization and adaptive clipping do."""
    model = run.model()

    def change(at, loss):
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
                rows = [one.norm(dim=1, keepdim=True).clamp(min=1e-3) for one in (p, p.grad)]
                most = 0.1 * rows[0]
                small = p.grad * (most / rows[1])
                p.grad.detach().copy_(torch.where(rows[1] < most, p.grad, small))

    train(run, model, sgd(model), change)


@script()
def gradients_kept_and_added(run):
    """Of two losses, as in multi-task scripts."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for x, t in run.batches():
        loss = step(x, t)
        loss.backward()
        kept = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        step(t, x).backward()
        for p, one in zip(model.parameters(), kept, strict=True):
            p.grad = 0.3 * one + 0.7 * p.grad
        run.see(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    run.end(model, optimizer)


@script()
def hooks_of_parameters(run):
    model = run.model()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    train(run, model, sgd(model))


@script()
def backward_twice(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for x, t in run.batches():
        loss = step(x, t)
        loss.backward(retain_graph=True)
        run.turn(loss, model, optimizer)
    run.end(model, optimizer)


@script()
def losses_added(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for x, t in run.batches():
        run.turn(step(x, t) + 0.5 * step(t, x), model, optimizer)
    run.end(model, optimizer)


@script("reads the gradient of")
def a_search_for_nan(run):
    model = run.model()

    def look(at, loss):
        if any(torch.isnan(p.grad).any() for p in model.parameters()):
            raise AssertionError("NaN")

    train(run, model, sgd(model), look)


@script()
def norms_are_logged(run):
    """Of gradients, and how many parameters there are."""
    model = run.model()

    def look(at, loss):
        for p in model.parameters():
            run.note(p.grad.norm())
        run.note(torch.tensor(sum(p.numel() for p in model.parameters() if p.requires_grad)))

    train(run, model, sgd(model), look)


@script(ELSEWHERE)
def norms_of_parameters_are_logged_on_rank_zero(run):
    model = run.model()

    def look(at, loss):
        if run.rank == 0:
            run.note(torch.stack([p.detach().norm() for p in model.parameters()]).norm())

    train(run, model, sgd(model), look)


@script(ELSEWHERE)
def a_penalty_outside_of_the_step(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for x, t in run.batches():
        penalty = sum(p.square().sum() for p in model.parameters())
        run.turn(step(x, t) + 0.01 * penalty, model, optimizer)
    run.end(model, optimizer)


@script(ELSEWHERE)
def one_vector_of_parameters(run):
    model = run.model()

    def after(at, loss):
        if at % 10 == 5:
            with torch.no_grad():
                vector = utils.parameters_to_vector(model.parameters())
                run.note(vector)
                utils.vector_to_parameters(vector * 0.9, model.parameters())

    train(run, model, sgd(model), after=after)


@script()
def weights_clamped(run):
    model = run.model()

    def after(at, loss):
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)

    train(run, model, sgd(model), after=after)


@script()
def a_layer_made_anew(run):
    """By its initialisation, and by values of one's own."""
    model = run.model()

    def after(at, loss):
        if at == 5:
            model.blocks[1].inner.reset_parameters()
            model.blocks[3].norm.reset_running_stats()
        if at == 10:
            nn.init.orthogonal_(model.first.weight)
            nn.init.zeros_(model.last.bias)

    torch.manual_seed(5)
    train(run, model, sgd(model), after=after)


@script()
def a_head_in_the_place_of_another(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        if at == 7:
            torch.manual_seed(7)
            model.last = nn.Linear(WIDTH, 3).to(run.dtype)
            optimizer = sgd(model)
        run.turn(step(x, t[:, :3] if at > 6 else t), model, optimizer)
    run.end(model, optimizer)


@script()
def a_wider_head(run):
    """Which begins as the other one: as a vocabulary grows."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        if at == 7:
            torch.manual_seed(7)
            before, model.last = model.last, nn.Linear(WIDTH, WIDTH + 2).to(run.dtype)
            model.last.weight.data[:WIDTH] = before.weight.data
            optimizer = sgd(model)
        run.turn(step(x, torch.cat([t, t[:, :2]], 1) if at > 6 else t), model, optimizer)
    run.end(model, optimizer)


@script(ELSEWHERE)
def exported(run):
    model = run.model()
    train(run, model, sgd(model))
    made = torch.export.export(model.eval(), (torch.ones(2, WIDTH, dtype=run.dtype),))
    run.note(*made.state_dict.values())


@script("where one rank trains all of these parameters: pfeife.clip_grad_norm_")
def clip_grad_norm_of_a_part(run):
    model = run.model()
    clip = lambda at, loss: run.note(utils.clip_grad_norm_(model.last.parameters(), 0.1))  # noqa: E731
    train(run, model, sgd(model), clip)


@script()
def folds(run):
    """All weights made anew for each."""
    model = run.model()
    step = run.compile(loss_of(model))
    for fold in range(3):
        torch.manual_seed(fold)
        model.apply(lambda one: one.reset_parameters() if hasattr(one, "reset_parameters") else 0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, t in run.batches(6):
            run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)


@script()
def seeds_in_the_loop(run):
    model = run.model()
    train(run, model, sgd(model), after=lambda at, loss: torch.manual_seed(at))


@script()
def frozen_and_thawed(run):
    model = run.model()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        if at == 6:
            model.blocks[1].requires_grad_(True)
        if at == 9:
            model.last.requires_grad_(False)
        if at == 12:
            model.requires_grad_(True)
        run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)


@script()
def a_head_on_a_frozen_model(run):
    """Then all of it, by another optimizer."""
    model = run.model().requires_grad_(False)
    model.last.requires_grad_(True)
    step, optimizer = run.compile(loss_of(model)), sgd(model.last)
    for at, (x, t) in enumerate(run.batches()):
        if at == 10:
            run.whole(model)
            model.requires_grad_(True)
            optimizer = sgd(model, lr=0.01)
        run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)


@script()
def evaluation_between(run):
    """Before training, in the middle, behind it; by the same step and by one of its own."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    validate = run.compile(lambda x, t: (model(x) - t).abs().mean())
    modes = (torch.no_grad, torch.inference_mode)
    for at, (x, t) in enumerate(run.batches()):
        if at % 5 == 0:
            model.eval()
            with modes[at // 5 % 2]():
                run.note(step(x, t), validate(t, x))
            model.train()
        run.turn(step(x, t), model, optimizer)
    model.eval()
    with torch.inference_mode():
        run.note(validate(x, t))
    run.end(model, optimizer)


@script()
def trained_in_evaluation_mode(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        model.train(at % 3 != 0)
        run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)


@script(small=True)
def several_steps_of_a_model(run):
    """A pretext task over a part of it, in turn with the whole."""
    model = run.model()
    whole, optimizer = run.compile(loss_of(model)), sgd(model)
    part = run.compile(lambda x: model.blocks[0](model.first(x)).square().mean())
    for at, (x, t) in enumerate(run.batches()):
        loss = part(x) if at % 2 else whole(x, t)
        run.turn(loss, model, optimizer)
    run.end(model, optimizer)


@script()
def stopped_early(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    best, kept = float("inf"), {}
    for at, (x, t) in enumerate(run.batches()):
        loss = step(x, t)
        if loss.item() < best:
            best, kept = loss.item(), copy.deepcopy(model.state_dict())
        if at > 15:
            break
        run.turn(loss, model, optimizer)
    model.load_state_dict(kept)
    run.end(model, optimizer)


@script()
def saved_by_rank_zero(run):
    model = run.model()
    optimizer, files = sgd(model), []

    def after(at, loss):
        if run.rank == 0 and at % 6 == 0:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            files.append(file)

    train(run, model, optimizer, after=after)
    for file in files:
        file.seek(0)
        found = torch.load(file, weights_only=True)
        run.note(*found["model"].values())
        tree_map_only(torch.Tensor, run.note, found["optimizer"]["state"])


@script()
def saved_and_loaded_by_all(run):
    """Back to where it was, in a script that goes on."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), torch.optim.AdamW(model.parameters(), lr=0.01)
    for at, (x, t) in enumerate(run.batches()):
        if at == 5:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if at == 12:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)


@script(STATISTICS)
def resumed_in_a_new_model(run):
    model = run.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(run, model, optimizer)
    again = run.model()
    again.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(again.parameters(), lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    train(run, again, other)


@script(ON_ONE)
def loaded_on_rank_zero(run):
    model = run.model()
    saved = {name: value + 1 for name, value in copy.deepcopy(model.state_dict()).items()}

    def after(at, loss):
        if at == 5 and run.rank == 0:
            model.load_state_dict(saved)

    train(run, model, sgd(model), after=after)


@script(ON_ONE)
def a_part_loaded_on_rank_zero(run):
    model = run.model()

    def after(at, loss):
        if at == 5 and run.rank == 0:
            part = {f"last.{n}": v + 1 for n, v in model.last.state_dict().items()}
            model.load_state_dict(part, strict=False)

    train(run, model, sgd(model), after=after)


@script()
def weights_averaged(run):
    """Of several checkpoints, loaded at the end."""
    model = run.model()
    found = []

    def after(at, loss):
        if at % 5 == 4:
            found.append({n: v.clone() for n, v in model.state_dict().items()})

    train(run, model, sgd(model), after=after)
    model.load_state_dict({n: sum(one[n] for one in found) / len(found) for n in found[0]})
    step = run.compile(loss_of(model))
    for x, t in run.batches(2):
        run.note(step(x, t).detach())
    run.end(model)


@script(ELSEWHERE)
def the_model_by_hand(run):
    model = run.model()

    def after(at, loss):
        if at == 5:
            with torch.no_grad():
                run.note(model.eval()(torch.ones(2, WIDTH, dtype=run.dtype)))
            model.train()

    train(run, model, sgd(model), after=after)


@script(STATISTICS)
def a_copy_of_the_model(run):
    """The best so far, kept as a module, evaluated and saved."""
    model = run.model()
    step, optimizer, best = run.compile(loss_of(model)), sgd(model), None
    for at, (x, t) in enumerate(run.batches()):
        loss = step(x, t)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.see(loss, model)
        if at == 10:
            best = copy.deepcopy(model)
    run.note(*best.state_dict().values())
    with torch.no_grad():
        run.note(run.compile(loss_of(run.known(best)))(x, t))
    run.end(model, optimizer)


@script(STATISTICS)
def a_moving_average(run):
    """As torch keeps it; evaluated, and saved."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    average = run.known(
        swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    )
    validate = run.compile(loss_of(average))
    for at, (x, t) in enumerate(run.batches()):
        run.turn(step(x, t), model, optimizer)
        average.update_parameters(model)
        if at % 7 == 0:
            with torch.no_grad():
                run.note(validate(x, t))
    whole = run.full(average.module)  # with the statistics of the first replica
    run.note(*(whole[name] for name, _ in average.module.named_parameters()))
    run.end(model, optimizer)


@script(STATISTICS)
def a_moving_average_by_hand(run):
    model = run.model()
    average = run.known(copy.deepcopy(model).requires_grad_(False))
    validate = run.compile(loss_of(average))

    @torch.no_grad()
    def after(at, loss):
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.mul_(0.9).add_(other, alpha=0.1)
        for mine, other in zip(average.buffers(), model.buffers(), strict=True):
            mine.copy_(other)

    train(run, model, sgd(model), after=after)
    for x, t in run.batches(2):
        with torch.no_grad():
            run.note(validate(x, t))


@script()
def an_average_put_in_its_place(run):
    """For an evaluation, then the weights again."""
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    for at, (x, t) in enumerate(run.batches()):
        run.turn(step(x, t), model, optimizer)
        with torch.no_grad():
            for mine, p in zip(average, model.parameters(), strict=True):
                mine.lerp_(p, 0.1)
            if at % 7 == 0:
                kept = [p.detach().clone() for p in model.parameters()]
                for p, mine in zip(model.parameters(), average, strict=True):
                    p.data.copy_(mine)
                run.note(step(x, t))
                for p, mine in zip(model.parameters(), kept, strict=True):
                    p.data.copy_(mine)
    run.end(model, optimizer)


@script(STATISTICS)
def stochastic_weight_averaging(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    average = run.known(swa_utils.AveragedModel(model))
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    for at, (x, t) in enumerate(run.batches()):
        run.turn(step(x, t), model, optimizer)
        if at > 10:
            average.update_parameters(model)
            schedule.step()
    forward = run.compile(lambda x: average(x))
    average.train()
    with torch.no_grad():
        for x, _ in run.batches(3):
            run.note(forward(x))
    run.end(model, optimizer)


@script()
def another_dtype(run):
    model = run.model()
    step, optimizer = run.compile(loss_of(model)), sgd(model)
    for at, (x, t) in enumerate(run.batches()):
        if at == 10:
            model.to(torch.float64)
            optimizer = sgd(model)
        if at >= 10:
            x, t = x.double(), t.double()
        run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight.tanh()


@script(tied=True)
def parametrized(run):
    """A spectral norm reads its weight twice, perhaps in two stages. At the other scripts' rate of
    0.05 it diverges on 8 stages: of a last bit plain torch makes 6e-8; at this rate 5e-12."""
    model = run.model()
    parametrizations.weight_norm(model.blocks[0].inner)
    parametrizations.spectral_norm(model.blocks[1].inner)
    parametrize.register_parametrization(model.last, "weight", Doubled())
    train(run, model, sgd(model, lr=0.02))


@script()
def low_rank_adapters(run):
    """By peft, over a frozen model; the adapter alone is saved."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(1)
    model = get_peft_model(run.model(), LoraConfig(r=2, target_modules=["inner", "last"]))
    model.to(run.dtype)
    parts = [p for p in model.parameters() if p.requires_grad]
    train(run, model, torch.optim.AdamW(parts, lr=0.01))
    run.note(*get_peft_model_state_dict(model).values())


@script(tied=True, small=True)
def two_players(run):
    """A generator and a critic, whose weights are clamped and which is frozen in turn."""
    maker, critic = layers(run, WIDTH, 8, 8, WIDTH), layers(run, WIDTH, 8, 1)
    fast, slow = torch.optim.RMSprop(critic.parameters()), torch.optim.Adam(maker.parameters())
    judge = run.compile(lambda x, z: critic(maker(z).detach()).mean() - critic(x).mean())
    make = run.compile(lambda z: -critic(maker(z)).mean())
    for at, (x, z) in enumerate(run.batches()):
        critic.requires_grad_(True)
        run.turn(judge(x, z), critic, fast)
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        if at % 3 == 2:
            critic.requires_grad_(False)
            run.turn(make(z), maker, slow)
    run.end(critic, fast)
    run.end(maker, slow)


@script(small=True)
def actor_and_critic(run):
    """Several steps for what one forward has said."""
    actor, critic = layers(run, WIDTH, 8, 8, 3), layers(run, WIDTH, 8, 1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)

    def both(x, chosen, before, gain, wanted):
        odds = torch.log_softmax(actor(x), -1).gather(1, chosen).squeeze(1)
        ratio = (odds - before).exp()
        better = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return F.mse_loss(critic(x).squeeze(1), wanted) - better

    act, value, step = run.compile(lambda x: actor(x)), run.compile(lambda x: critic(x)), None
    for x, t in run.batches(6):
        with torch.no_grad():
            odds, found = torch.log_softmax(act(x), -1), value(x).squeeze(1)
        before, chosen = odds.max(-1, keepdim=True)
        step = step or run.compile(both)
        for _ in range(3):
            gain = t[:, 0] - found
            loss = step(x, chosen, before.squeeze(1), gain / gain.std(), t[:, 0])
            loss.backward()
            run.see(loss, actor)
            run.note(utils.clip_grad_norm_(parameters, 0.5))
            optimizer.step()
            optimizer.zero_grad()
    run.end(actor, optimizer)


@script(small=True)
def a_target_that_follows(run):
    """As in reinforcement learning: a moving average by `data`, in a step of its own."""
    model, target = layers(run, WIDTH, 8, 8, WIDTH), layers(run, WIDTH, 8, 8, WIDTH)
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step, value = run.compile(loss_of(model)), run.compile(lambda x: target(x))
    for x, t in run.batches():
        with torch.no_grad():
            wanted = t + 0.9 * value(t)
        run.turn(step(x, wanted), model, optimizer)
        for mine, p in zip(target.parameters(), model.parameters(), strict=True):
            mine.data.copy_(0.1 * p.data + 0.9 * mine.data)
    run.end(model, optimizer)
    run.whole(target)


@script("has no values any more on rank", small=True)
def keys_that_follow(run):
    """The same within a step that trains (momentum contrast)."""
    model, keys = layers(run, WIDTH, 8, WIDTH), layers(run, WIDTH, 8, WIDTH).requires_grad_(False)

    def contrast(x, t):
        odds = F.normalize(model(x), dim=1) @ F.normalize(keys(t), dim=1).T
        return F.cross_entropy(odds, torch.arange(len(x)))

    step, optimizer = run.compile(contrast), sgd(model)
    for x, t in run.batches():
        for mine, p in zip(keys.parameters(), model.parameters(), strict=True):
            mine.data = mine.data * 0.9 + p.data * 0.1
        run.turn(step(x, t), model, optimizer)
    run.end(model, optimizer)
