"""The figures of a plan: what a step is expected to take, where, and what it waits for."""

import attrs

from pfeife.data import checks

_BYTES = checks.each(checks.not_negative)
KINDS = ("computes", "messages", "reduces", "members")  # of what a step waits for


@attrs.frozen
class StageForecast:
    """One stage: its layers from `first` to `last` (paths of modules), `parameters` in elements,
    seconds of one microbatch, and bytes that it sends to other ranks for one, both ways; of the
    backward's seconds `again_seconds` go into what is recomputed, and `telling_seconds` of both
    into what members of a group tell one another. Every microbatch but the first takes
    `adding_seconds` more, in which its gradients are added to those before."""

    stage: int
    rank: int
    first: str
    last: str
    clusters: int
    parameters: int = attrs.field(validator=checks.not_negative)
    forward_seconds: float = attrs.field(validator=checks.seconds)
    backward_seconds: float = attrs.field(validator=checks.seconds)
    sent_bytes: int = attrs.field(validator=checks.not_negative)
    parameter_bytes: int = attrs.field(default=0, validator=checks.not_negative)
    again_seconds: float = attrs.field(default=0.0, validator=checks.seconds)
    adding_seconds: float = attrs.field(default=0.0, validator=checks.seconds)
    telling_seconds: float = attrs.field(default=0.0, validator=checks.seconds)


@attrs.frozen
class RankForecast:
    """One rank of a pipeline: seconds of a step in which it computes, the share of the step in
    which it does not (its bubble), and the bytes at its peak by what they are."""

    rank: int
    computing_seconds: float = attrs.field(validator=checks.seconds)
    bubble: float = attrs.field(validator=checks.fraction)
    bytes: dict[str, int] = attrs.field(validator=_BYTES)

    @property
    def peak_bytes(self) -> int:
        """All bytes at the rank's peak."""
        return sum(self.bytes.values())


@attrs.frozen
class Wait:
    """A part of the critical path: what somebody does there, in so many actions, and of which kind
    that is."""

    what: str
    actions: int
    seconds: float = attrs.field(validator=checks.seconds)
    share: float = attrs.field(validator=checks.fraction)
    kind: str = attrs.field(default=KINDS[0], validator=attrs.validators.in_(KINDS))


@attrs.frozen
class Forecast:
    """What a plan is expected to do, by estimates alone.

    `ranks` are those of a pipeline, each a group of `members`, of which there are `replicas`;
    `microbatches`, `samples` and `tokens` (0 if the batch has none) are those of a step of all
    replicas. `flops` are the operations of the model's forward and backward by torch's formulas in
    such a step (those of all members), without what is recomputed, and `peak_seconds` how long all
    ranks would take for them at the peak rates of the machine, each in the dtype that is
    multiplied. `bound_seconds` is what no schedule of these stages undercuts, None where that is
    not known. `waits` is the critical path, the longest part first. `network` says what joins the
    ranks, where that was asked for; `cut_blocks` are the model's repeated blocks that several
    stages share. `parameter_bytes` are those of `parameters`.
    `asked` is what was asked for in words, by their names, if the command line was. Replicas have
    `shared_out` gradients and optimizer state, or each has all.
    """

    machine: str
    schedule: str
    ranks: int
    replicas: int
    microbatches: int
    parameters: int
    samples: int
    tokens: int
    step_seconds: float = attrs.field(validator=checks.seconds)
    bound_seconds: float | None = attrs.field(validator=checks.seconds)
    flops: int = attrs.field(validator=checks.not_negative)
    peak_seconds: float = attrs.field(validator=checks.seconds)
    memory_limit: int = attrs.field(validator=checks.positive)
    stages: tuple[StageForecast, ...]
    by_rank: tuple[RankForecast, ...]
    waits: tuple[Wait, ...]
    network: str = ""
    cut_blocks: tuple[str, ...] = ()
    parameter_bytes: int = attrs.field(default=0, validator=checks.not_negative)
    asked: dict[str, str] = attrs.field(factory=dict)
    members: int = attrs.field(default=1, validator=checks.positive)
    shared_out: bool = False

    @property
    def world(self) -> int:
        """All ranks of all replicas."""
        return self.ranks * self.replicas * self.members

    @property
    def samples_per_second(self) -> float:
        """Rows of all replicas."""
        return self.samples / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Elements of the batch's first tensor of integers, of all replicas."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def utilization(self) -> float:
        """Model FLOP/s utilization (Chowdhery et al., PaLM, 2022, appendix B): `peak_seconds` over
        `step_seconds`."""
        return self.peak_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def bubble(self) -> float:
        """The mean of the ranks' bubbles."""
        return sum(rank.bubble for rank in self.by_rank) / max(len(self.by_rank), 1)

    @property
    def gap(self) -> float | None:
        """How much longer than its bound a step takes: 0.02 is 2 %."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else None

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max((rank.peak_bytes for rank in self.by_rank), default=0)

    @property
    def limited_by(self) -> str:
        """What a step waits for, in words."""
        # Below half a percent rounding would print 0 %.
        long = [wait for wait in self.waits if wait.share >= 0.005]
        return "; ".join(f"{wait.what} for {wait.share:.0%} of the step" for wait in long[:3])
