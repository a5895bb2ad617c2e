"""What calls cost, and what was decided about them: cuts, ranks, schedule, recomputation."""

from reprlib import repr as short

import attrs

from pfeife.data import checks
from pfeife.data.schedule import Schedule
from pfeife.data.units import duration

_EACH_SECONDS = checks.each(checks.seconds)
_EACH_BYTES = checks.each(checks.not_negative)


@attrs.frozen
class Costs:
    """Seconds of one microbatch in every call of a program, by the name of the call's node.

    `spread` is the measurements' interquartile range in seconds, empty for estimates;
    `accumulate` what it takes to add the gradients of a call to those of earlier microbatches;
    `inside` the bytes that a call's operations need inside of themselves, where that was measured.
    """

    source: str
    seconds: dict[str, float] = attrs.field(validator=_EACH_SECONDS)
    spread: dict[str, float] = attrs.field(factory=dict, validator=_EACH_SECONDS)
    accumulate: dict[str, float] = attrs.field(factory=dict, validator=_EACH_SECONDS)
    inside: dict[str, int] = attrs.field(factory=dict, validator=_EACH_BYTES)

    def __attrs_post_init__(self) -> None:
        unknown = sorted({*self.spread, *self.accumulate, *self.inside} - set(self.seconds))
        if unknown:
            raise ValueError(f"Costs: {short(unknown)} have a spread or bytes, but no seconds")


@attrs.frozen
class RecomputeOption:
    """What one stage computes again in its backward instead of saving it.

    `names` are nodes of the stage's forward; what they read and is not named is saved. Then a
    microbatch keeps `saved` bytes from forward to backward, and its backward takes
    `extra_seconds` more.
    """

    saved: int = attrs.field(default=0, validator=checks.not_negative)
    extra_seconds: float = attrs.field(default=0.0, validator=checks.seconds)
    names: tuple[str, ...] = ()


@attrs.frozen
class Plan:
    """Where to cut, where to run, and in which order.

    `stage_of_cluster` has a stage for every cluster; the stages' ranks are those of the
    schedule. Values of the nodes named in `duplicated` are computed by every stage that reads
    them instead of sent. `recompute` has an option for every stage, or is empty: then all that a
    backward reads is saved. `stage_seconds` (forward and backward of one microbatch) and
    `step_seconds` are what the planner expects, None if it knew no costs; no schedule of these
    stages on these ranks takes less than `bound_seconds`. `interrupted` says that the clock cut
    a search short, so that another one may find another plan. `program` is the digest of the
    program that the plan was made for (see `ir.digest`), None if nobody said. Raises ValueError if
    the schedule has fewer stages, or if there is not one entry for every stage.

    Next: `pfeife.apply(plan)` makes the program of the ranks of that of the clusters, `.schedule`
    is what each rank does, `data.plain.save` and `load` keep a plan in a file.
    """

    stage_of_cluster: tuple[int, ...] = attrs.field(validator=checks.each(checks.not_negative))
    schedule: Schedule
    duplicated: tuple[str, ...] = ()
    stage_seconds: tuple[float, ...] | None = attrs.field(default=None, validator=_EACH_SECONDS)
    step_seconds: float | None = attrs.field(default=None, validator=checks.seconds)
    bound_seconds: float | None = attrs.field(default=None, validator=checks.seconds)
    recompute: tuple[RecomputeOption, ...] = ()
    interrupted: bool = False
    program: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.stages > self.schedule.stages:
            raise ValueError(
                f"Plan: the clusters are in {self.stages} stages, the schedule runs "
                f"{self.schedule.stages}"
            )
        for field in ("stage_seconds", "recompute"):
            entries = getattr(self, field)
            if entries and len(entries) != self.stages:
                raise ValueError(f"Plan.{field}: {len(entries)} entries for {self.stages} stages")

    def __repr__(self) -> str:
        """At most a page of it; `data.plain.to_json` has all."""
        starts = [self.stage_of_cluster.index(s) for s in sorted({*self.stage_of_cluster})]
        parts = [f"{len(self.stage_of_cluster)} clusters in {self.stages} stages"]
        parts.append(f"which start at clusters {short(starts)}")
        if self.step_seconds is not None:
            parts.append(f"a step takes {duration(self.step_seconds)}")
        if self.bound_seconds is not None:
            parts.append(f"at least {duration(self.bound_seconds)}")
        if self.recompute:
            parts.append("recomputes")
        whole = "  all of the plan: pfeife.data.plain.to_json(plan)"
        return f"Plan({', '.join(parts)})\n{self.schedule!r}\n{whole}"

    @property
    def stages(self) -> int:
        """How many stages the clusters are in."""
        return 1 + max(self.stage_of_cluster, default=-1)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage, in the schedule."""
        return self.schedule.stage_ranks
