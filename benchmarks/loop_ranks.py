"""One process of the loops: each is run compiled and, beside it, by plain eager accumulation.

    python benchmarks/loop_ranks.py LOOPS REPORT LIMIT [STORE_PORT]

LOOPS is a JSON list of loops, each over in LIMIT seconds; a line of JSON goes to REPORT for each.
What a rank asks for itself is what it must get: its losses are those of its own eager loop, or an
error says why not.
"""

import copy
import faulthandler
import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from loop_cases import Action, Loop, batch, loop_from, models
from torch import nn

import pfeife
from pfeife.testing import own_gradients

SILENCE = 10.0  # `timeout` of the compiled steps
LEFT = 3  # the exit code of a rank that the others do not meet
DEATH = 6  # seconds after which a rank that has stopped ends, as its script would
ONE_GRAPH = "the step could not be captured as one graph: "
# The errors that may end a loop: a word for it, the class, how the message begins (a pattern).
# What stops one rank stops the others with the same words, after the number of that rank.
DOCUMENTED = (
    ("its own exception", "KeyError", ".*the step's own"),
    ("its own exception", "ValueError", f"{ONE_GRAPH}it raises .*the step's own"),
    ("its own exception", "RefusedByBoth", f"{ONE_GRAPH}it raises .*the step's own"),
    ("one row", "ValueError", f"{ONE_GRAPH}.*Expected more than 1 value per channel"),
    ("a rank failed", "PipelineError", ""),
    ("too few clusters", "ValueError", r"\d+ stages, but the program has only"),
    ("microbatches", "ValueError", r"microbatch: a batch of \d+ rows does not divide into"),
    ("no loss", "ValueError", "loss=.*is no differentiable scalar"),
    ("ranks differ", "ValueError", "the arguments of this call: ranks"),
    ("ranks differ", "ValueError", "the program: ranks"),
    ("ranks differ", "ValueError", r"rank \d+ is at .* and rank 0 at "),
    ("ranks differ", "ValueError", r"the gradient of \w+ is another one on rank \d+ than on"),
    ("ranks differ", "ValueError", r"\[.*\] \(\d+ in all\) are not the same on all ranks\."),
    ("loaded on one rank", "ValueError", r"[\w.]+ has been written to"),
    (
        "loaded on one rank",
        "ValueError",
        "rank .*has none of this point .* loads of state.* by now",
    ),
    ("clipped by rank", "ValueError", "between backward.. and optimizer.step.. the gradients"),
    ("state of others", "ValueError", r"state of other ranks: .*full_state_dict\(model\)"),
    ("state of others", "ValueError", "state of other ranks: .*Compute that inside of the step"),
    ("second backward", "RuntimeError", "backward ran a second time|Trying to backward through"),
    ("changed in place", "RuntimeError", "one of the variables needed"),
)
ALONE = ("loaded on one rank",)  # only if the loop has one rank do something alone
OF_A_RANK = r"rank \d+: (\w+): "


class Difference(Exception):
    """A number that is not eager's, and nobody said so."""


class Loud(Exception):
    """NaN where eager has numbers: wrong, and seen at once."""


class Switch:
    """What the steps look at beside their arguments."""

    explode = False


def step_of(model: nn.Module, switch: Switch) -> Callable[..., torch.Tensor]:
    def step(x, t, scale=1.0, mode="square"):
        if switch.explode:
            raise KeyError("the step's own")
        return loss_of(model(x), t, scale, mode)

    return step


def loss_of(out, t, scale=1.0, mode="square"):
    error = (out - t).square() if mode == "square" else (out - t).abs()
    return error.mean() * scale


@attrs.define(eq=False)
class EagerLoss:
    """The mean of microbatch losses, each with its own graph."""

    value: torch.Tensor
    parts: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    parameters: list[nn.Parameter]

    def backward(self, retain_graph: bool = False) -> None:
        """Adds the sum over this call's microbatches, in their order, to what is there."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            for part, gradient in zip(self.parts, self.gradients, strict=True):
                part.backward(gradient, retain_graph=retain_graph)
        finally:
            for parameter, old in zip(self.parameters, before, strict=True):
                if old is not None:
                    new = parameter.grad
                    parameter.grad = old if new is None else old + new


class Side:
    """The state of a script: two models that share a layer, an optimizer, what is kept."""

    def __init__(self, loop: Loop):
        self.loop, self.switch = loop, Switch()
        self.models = models(loop)
        union = dict.fromkeys(p for model in self.models for p in model.parameters())
        kind = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}
        more = {"momentum": 0.9} if loop.optimizer == "momentum" else {}
        self.optimizer = kind[loop.optimizer](list(union), lr=0.05, **more)
        self.losses: list[torch.Tensor] = []
        self.saved = copy.deepcopy(self.models[0].state_dict())
        self.kept: list[Any] = []

    def noted(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())


class Ours(Side):
    """The compiled loop."""

    def __init__(self, loop: Loop):
        super().__init__(loop)
        self.steps: dict[int, Callable] = {}

    def call(self, which: int, x, t, **more) -> torch.Tensor:
        """Through step 0, step 1 (the same model again), or step 2 (of the second model)."""
        loop, model = self.loop, self.models[which // 2]
        if which not in self.steps:
            options: dict[str, Any] = {"microbatches": loop.microbatches, "stages": loop.stages}
            options |= {"schedule": loop.schedule, "timeout": SILENCE, "progress": False}
            options["loss"] = None if loop.outside else loop.loss
            step = (lambda x: model(x)) if loop.outside else step_of(model, self.switch)
            self.steps[which] = pfeife.compile(step, **options)
        if loop.outside:
            if self.switch.explode:
                raise KeyError("the step's own")
            loss = loss_of(self.steps[which](x), t, **more)
        else:
            loss = self.steps[which](x, t, **more)
        self.noted(loss)
        return loss


class Eager(Side):
    """The plain loop, over as many microbatches as the compiled one is to take."""

    def __init__(self, loop: Loop):
        super().__init__(loop)
        self.most: dict[int, int] = {}  # rows of a microbatch of each step so far

    def call(self, which: int, x, t, **more) -> EagerLoss:
        model, many = self.models[which // 2], self.count(which, len(x))
        step = step_of(model, self.switch)
        if self.switch.explode:
            step(x, t)
        found = self._once(model, step, many, x.clone(), t.clone(), more)
        self.noted(found.value)
        return found

    def count(self, which: int, rows: int) -> int:
        """Into how many microbatches a batch is cut: a smaller one that does not divide into as
        many as keep their rows at most those of the largest so far."""
        many = self.loop.microbatches
        if rows % many:
            most = self.most[which]
            many = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most)
        self.most[which] = max(self.most.get(which, 0), rows // many)
        return many

    def _once(self, model, step, many, x, t, more) -> EagerLoss:
        own = list(model.parameters())
        rows = list(zip(x.chunk(many), t.chunk(many), strict=True))
        if not self.loop.outside:
            parts = [step(*one, **more) / many for one in rows]
            return EagerLoss(sum_in_order(parts), parts, [None] * many, own)
        outs = [model(one) for one, _ in rows]
        whole = torch.cat([out.detach() for out in outs]).requires_grad_(outs[0].requires_grad)
        loss = loss_of(whole, t, **more)
        if not loss.requires_grad:
            return EagerLoss(loss, [], [], own)
        (gradient,) = torch.autograd.grad(loss, whole)
        return EagerLoss(loss.detach(), outs, list(gradient.chunk(many)), own)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].detach()
    for part in parts[1:]:
        total = total + part.detach()
    return total


def same(one: torch.Tensor, other: torch.Tensor, close: bool = False) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if close:
        return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    return torch.equal(one, other) or bool((one.isnan() & other.isnan()).all())


class Player:
    """Runs a loop on this rank, both sides of it."""

    def __init__(self, loop: Loop, rank: int, size: int):
        self.loop, self.rank, self.size = loop, rank, size
        self.ours, self.eager = Ours(loop), Eager(loop)
        self.number = self.debt = 0
        self.trained: set[tuple[int, str]] = set()
        self.at = ""

    def run(self) -> None:
        for action in self.loop.actions:
            self.at = str(action)
            self.play(action)
            self.compare_losses()
        self.at = "the end"
        for _ in range(self.debt):  # every rank makes as many calls
            self.train()
            self.compare_losses()
        self.compare_state()

    def play(self, action: Action) -> None:
        name, value = action.name, action.value
        mine = action.rank in (None, self.rank)
        if name == "skip" and mine and action.rank is not None:
            self.number += 1
            self.debt += 1
        elif name == "load":
            self.load() if mine else None
        elif name == "freeze":
            self.freeze(value) if mine else None
        elif name == "seed":
            torch.manual_seed(value) if mine else None
        elif name in ("save", "save all"):
            self.save(whole=name == "save all")
        elif name == "raise":
            self.explode(mine, action.rank is not None)
        elif name == "by hand":
            self.by_hand()
        elif name == "eval":
            self.evaluate(which=value % 2)
        elif name == "eval mode":
            self.mode(not mine)
            self.train()
            self.mode(True)
        else:
            self.train(**self.options(name, value, mine))

    def options(self, name: str, value: int, mine: bool) -> dict[str, Any]:
        """How a training step of this name differs from the plain one."""
        loop = self.loop
        return {
            "accumulate": {"calls": 2},
            "rows": {"rows": loop.microbatches * (2 + value % 3)},
            "last": {"rows": loop.rows - 1 - (value % 2 if loop.microbatches > 2 else 0)},
            "second model": {"which": 2},
            "second step": {"which": 1},
            "clip": {"clip": nn.utils.clip_grad_norm_},
            "clip all": {"clip": pfeife.clip_grad_norm_},
            "scale": {"scale": 0.5 + value / 4} if mine else {},
            "mode": {"mode": "abs"} if mine else {},
            "in place": {"change": True},
            "kept": {"keep": True},
            "twice": {"backwards": 2},
            "retained": {"backwards": 2, "retain": True},
            "differ": {"shift": 1.0 if mine else 0.0},
            "penalty": {"penalty": True},
        }.get(name, {})

    def train(self, *, calls: int = 1, rows: int | None = None, **how: Any) -> None:
        for side in (self.ours, self.eager):
            side.optimizer.zero_grad()
        first = self.number
        for number in range(first, first + calls):
            data = batch(self.loop, number, rows or self.loop.rows)
            self.one_call(self.ours, data, **how)
            try:
                self.one_call(self.eager, data, **how)
            except Exception as error:
                raise Difference(f"eager alone raises {type(error).__name__}: {error}") from error
        self.number = first + calls
        for index, model in enumerate(self.ours.models):
            self.trained |= {(index, name) for name in own_gradients(model)}
        if "clip" in how:
            how["clip"](self.ours.optimizer.param_groups[0]["params"], 0.05)
            nn.utils.clip_grad_norm_(self.eager.optimizer.param_groups[0]["params"], 0.05)
        for side in (self.ours, self.eager):
            side.optimizer.step()

    def one_call(
        self,
        side: Any,
        data: list[torch.Tensor],
        *,
        which: int = 0,
        shift: float = 0.0,
        change: bool = False,
        keep: bool = False,
        backwards: int = 1,
        retain: bool = False,
        penalty: bool = False,
        clip: Callable[..., torch.Tensor] | None = None,
        **more: Any,
    ) -> None:
        x, t = data[0] + shift, data[1].clone()
        loss = side.call(which, x, t, **more)
        if keep:
            side.kept.append(loss)
        if change:
            x.mul_(2)
        if penalty:  # beside the step, over all parameters
            whole = sum(p.square().sum() for p in side.models[0].parameters())
            side.noted(whole)
            if whole.requires_grad:
                (0.01 * whole).backward()
        for attempt in range(backwards):
            self.backward(side, loss, retain, again=attempt > 0)

    def backward(self, side: Any, loss: Any, retain: bool, again: bool) -> None:
        """A second backward without retained graph is an error of eager's own, on both sides."""
        refused = None
        try:
            loss.backward(retain_graph=retain)
        except RuntimeError as error:
            frozen = "does not require grad" in str(error)
            if not frozen and (not again or retain):
                raise
            refused = error
        side.noted(torch.tensor(0.0 if refused is None else 1.0))

    def evaluate(self, which: int) -> None:
        self.mode(False)
        data = batch(self.loop, self.number, self.loop.rows)
        with torch.no_grad():
            self.ours.call(which, *data)
            self.eager.call(which, *data)
        self.mode(True)

    def mode(self, train: bool) -> None:
        for side in (self.ours, self.eager):
            for model in side.models:
                model.train(train)

    def by_hand(self) -> None:
        self.mode(False)
        x, _ = batch(self.loop, self.number, self.loop.rows)
        with torch.no_grad():
            for side in (self.ours, self.eager):
                side.noted(side.models[0](x))
        self.mode(True)

    def explode(self, mine: bool, alone: bool) -> None:
        """The step's own Python raises; if it does so on all ranks, the script goes on."""
        data = batch(self.loop, self.number, self.loop.rows)
        self.number += 1
        found: list[Exception | None] = []
        for side in (self.ours, self.eager):
            side.switch.explode = mine
            try:
                side.call(0, *data)
                found.append(None)
            except Exception as error:
                found.append(error)
            side.switch.explode = False
        if mine and found[0] is None:
            raise Difference("the step's own exception was lost")
        if found[0] is not None and (alone or not mine):
            raise found[0]

    def freeze(self, value: int) -> None:
        for side in (self.ours, self.eager):
            parameters = list(side.models[0].parameters())
            one = parameters[value % len(parameters)]
            one.requires_grad_(not one.requires_grad)

    def save(self, whole: bool) -> None:
        model = self.ours.models[0]
        state = pfeife.full_state_dict(model) if whole else model.state_dict()
        expected = self.eager.models[0].state_dict()
        for name, value in expected.items():
            self.check(f"saved {name}", state[name], value)
        self.eager.saved = copy.deepcopy(expected)

    def load(self) -> None:
        for side in (self.ours, self.eager):
            side.models[0].load_state_dict(self.eager.saved)

    def compare_losses(self) -> None:
        pairs = zip(self.ours.losses, self.eager.losses, strict=True)
        for index, (one, other) in enumerate(pairs):
            self.check(f"loss {index}", one, other)
        self.ours.losses, self.eager.losses = [], []
        for one, other in zip(self.ours.kept, self.eager.kept, strict=True):
            self.check("a kept loss", one.detach(), other.value)

    def compare_state(self) -> None:
        """Of what this rank trains: gradients, parameters, and the buffers beside them. And the
        whole state of the models."""
        for index, (mine, eager) in enumerate(
            zip(self.ours.models, self.eager.models, strict=True)
        ):
            theirs = dict(eager.named_parameters())
            trained = {n for i, n in self.trained if i == index}
            for name, one in mine.named_parameters():
                if self.size > 1 and name not in trained:
                    continue
                other = theirs[name]
                self.check(name, one.detach(), other.detach())
                if (one.grad is None) != (other.grad is None):
                    raise Difference(f"the gradient of {name}: {one.grad}, eager's {other.grad}")
                if one.grad is not None:
                    self.check(f"the gradient of {name}", one.grad, other.grad)
            places = {name.rpartition(".")[0] for name in trained}
            for name, buffer in mine.named_buffers():
                if self.size == 1 or name.rpartition(".")[0] in places:
                    self.check(name, buffer, eager.get_buffer(name))
        for mine, eager in zip(self.ours.models, self.eager.models, strict=True):
            found = pfeife.full_state_dict(mine)
            for name, value in eager.state_dict().items():
                self.check(f"all ranks' {name}", found[name], value)

    def check(self, name: str, one: torch.Tensor, other: torch.Tensor) -> None:
        close = self.loop.net == "tied" and self.loop.stages > 1
        if same(one, other, close):
            return
        if one.is_floating_point() and one.isnan().any() and not other.isnan().any():
            raise Loud(f"{name} is NaN")
        if one.shape != other.shape or one.dtype != other.dtype:
            kinds = f"{one.dtype} {[*one.shape]}, eager's {other.dtype} {[*other.shape]}"
            raise Difference(f"{name}: {kinds}")
        at = int((one - other).abs().nan_to_num(torch.inf).argmax())
        a, b = one.flatten()[at].item(), other.flatten()[at].item()
        raise Difference(f"{name}: {a} at {at}, eager's {b}")

    def wanted(self) -> list[str]:
        """The parameters that eager has trained, and those that this rank has."""
        eager = [
            f"{i} {n}"
            for i, model in enumerate(self.eager.models)
            for n, p in model.named_parameters()
            if p.grad is not None
        ]
        return [*eager, "/", *(f"{i} {n}" for i, n in sorted(self.trained))]


def played(loop: Loop, rank: int, size: int) -> dict[str, Any]:
    """What became of a loop on this rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    start, player = time.monotonic(), None
    kind, word, text, parts = "right", "", "", []
    try:
        player = Player(loop, rank, size)
        player.run()
        parts = player.wanted()
    except Difference as error:
        kind, text = "silent", str(error)
    except Loud as error:
        kind, word, text = "stopped", "NaN", str(error)
    except Exception as error:
        word, text = documented(error), f"{type(error).__name__}: {error}"
        if word in ALONE and all(action.rank is None for action in loop.actions):
            word = ""
        kind = "stopped" if word else "undocumented"
    return {
        "index": loop.index,
        "kind": kind,
        "word": word,
        "text": text[:1500],
        "at": player.at if player else "",
        "seconds": time.monotonic() - start,
        "parts": parts,
    }


def documented(error: Exception) -> str:
    """The word for an error that may end a loop, "" for any other."""
    classes, text = {one.__name__ for one in type(error).__mro__}, str(error)
    told = re.match(OF_A_RANK, text) if isinstance(error, ValueError) else None
    if told:
        classes, text = {told[1]}, text[told.end() :]
    for word, kind, begins in DOCUMENTED:
        if kind in classes and re.match(begins, text, re.DOTALL):
            return word
    return ""


def met(store: dist.Store, loop: Loop, rank: int, size: int, kind: str, limit: int) -> bool:
    """Waits for the others at the end of a loop. False if they do not come: then one has stopped
    alone, and ends as its script would."""
    store.set(f"{loop.index}/{rank}", kind)
    patience = limit if kind == "right" else DEATH
    try:
        store.wait([f"{loop.index}/{r}" for r in range(size)], timedelta(seconds=patience))
        found = "met"
    except dist.DistError:
        found = "left"
    return store.compare_set(f"{loop.index}", "", found) == b"met"


def main(loops: Path, report: Path, limit: int, port: int | None = None) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = dist.TCPStore("127.0.0.1", port, None, False) if port else None
    trace = report.with_suffix(".trace").open("w")
    for data in json.loads(loops.read_text()):
        faulthandler.dump_traceback_later(limit, exit=True, file=trace)
        loop = loop_from(data)
        line = played(loop, rank, size)
        faulthandler.cancel_dump_traceback_later()
        with report.open("a") as out:
            out.write(json.dumps(line) + "\n")
        if store is not None and not met(store, loop, rank, size, line["kind"], limit):
            sys.exit(LEFT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
