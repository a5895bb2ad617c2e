"""How pipelines are replicated, and what becomes of the gradients of their replicas."""

from collections.abc import Mapping
from typing import Literal, get_args

import attrs

from pfeife.data import checks

DataParallel = Literal["average", "shard"]
BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel has it


def _known(instance: object, attribute: attrs.Attribute, value: str) -> None:
    if value not in get_args(DataParallel):
        raise ValueError(
            f"{checks.named(instance, attribute)}={value!r}: must be 'average' or 'shard'"
        )


@attrs.frozen
class Replicas:
    """So many pipelines that share the microbatches.

    "average": every replica gets all gradients. "shard": each gradient goes to one replica, its
    owner, which alone keeps optimizer state for it (ZeRO-2; Rajbhandari et al., SC 2020). Gradients
    of a stage travel together in buckets of at most `bucket_bytes`, or of one gradient. `owners`
    has the replicas that train some parameters already, None for those that all train. With `apart`
    a rank is given the rows of its own replica alone.
    """

    count: int = attrs.field(default=1, validator=checks.positive)
    how: DataParallel = attrs.field(default="average", validator=_known)
    bucket_bytes: int = attrs.field(default=BUCKET_BYTES, validator=checks.positive)
    owners: Mapping[str, int | None] = attrs.field(factory=dict)
    apart: bool = False

    @property
    def shards(self) -> int:
        """In how many parts optimizers keep their state."""
        return self.count if self.how == "shard" else 1


def replicas_of(replicas: "int | Replicas") -> Replicas:
    """Replicas that average, where only their number is given."""
    return replicas if isinstance(replicas, Replicas) else Replicas(replicas)
