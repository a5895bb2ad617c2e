"""What to do about what limits a step, from its forecast."""

from pfeife.data.forecast import Forecast, RankForecast, Wait

_LITTLE = 0.05  # of a step, below which a loss is not worth a change
_WHOLE_BACKWARDS = ("1f1b", "gpipe", "interleaved")


def advice(found: Forecast) -> str:
    """A sentence about what a step loses most by: the pipeline's filling and emptying, ranks that
    compute longer than others, messages, the reduction of gradients, or recomputation."""
    step, ranks = found.step_seconds, found.by_rank
    if not (step and ranks):
        return "nothing is computed"
    longest = max(ranks, key=lambda one: one.computing_seconds)
    mean = sum(one.computing_seconds for one in ranks) / len(ranks)
    carried = [one for one in found.waits if one.kind == "messages"]
    messages = sum(one.seconds for one in carried)
    reduced = sum(one.seconds for one in found.waits if one.kind == "reduces")
    again = _again(found, longest)
    filling = step - longest.computing_seconds - messages - reduced
    said = {
        _of_filling(found, filling / step): filling,
        _of_uneven(found, longest, mean): longest.computing_seconds - mean - again,
        _of_messages(carried, messages / step): messages,
        f"gradients are reduced for {reduced / step:.0%} of the step: join the replicas by faster "
        "links, or take more microbatches a step": reduced,
        f"rank {longest.rank} computes again for {again / step:.0%} of the step, to fit into its "
        "memory: take ranks with more of it, more ranks a pipeline, or a data_parallel of shard "
        "for replicas": again,
    }
    most = max(said, key=lambda text: said[text])
    if said[most] < _LITTLE * step:
        return (
            f"ranks compute for {mean / step:.0%} of the step: only more or faster ones make it "
            "much shorter"
        )
    return most


def _again(found: Forecast, rank: RankForecast) -> float:
    """The seconds of a step in which a rank recomputes."""
    count = found.microbatches // found.replicas
    return count * sum(one.again_seconds for one in found.stages if one.rank == rank.rank)


def _of_filling(found: Forecast, share: float) -> str:
    count = found.microbatches // found.replicas
    text = (
        f"the pipeline fills and empties for {share:.0%} of the step: take more than {count} "
        f"microbatches for {found.ranks} ranks"
    )
    if found.gap is not None and found.gap > _LITTLE:
        text += f", or search a schedule, which may save {found.gap / (1 + found.gap):.0%} at most"
    elif found.schedule in _WHOLE_BACKWARDS:
        text += ", or a schedule that splits backwards, such as zb-h1"
    return text


def _of_uneven(found: Forecast, rank: RankForecast, mean: float) -> str:
    own = [one for one in found.stages if one.rank == rank.rank]
    layers = ", ".join(f"{one.first} to {one.last}" for one in own[:2])
    text = f"rank {rank.rank} computes {rank.computing_seconds / (mean or 1):.1f} times as long as "
    text += f"the mean ({layers}): "
    if all(one.clusters == 1 for one in own):
        return f"{text}that cannot be cut further, so take fewer ranks in a pipeline"
    more = "" if len(found.stages) > found.ranks else ", or two stages a rank (interleaved)"
    return f"{text}take fewer ranks in a pipeline{more}"


def _of_messages(carried: list[Wait], share: float) -> str:
    most = carried[0].what if carried else ""
    where = most.removesuffix(" carries messages")
    return (
        f"messages take {share:.0%} of the step, {where} most: a faster link there, a cut where "
        "less is sent (cut_at blocks), or fewer ranks in a pipeline"
    )
