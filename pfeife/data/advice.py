"""What to do about what limits a step, from its forecast."""

from pfeife.data.forecast import Forecast, RankForecast, Wait

_LITTLE = 0.05  # of a step, below which a loss is not worth a change
_WHOLE_BACKWARDS = ("1f1b", "gpipe", "interleaved")


def advice(forecast: Forecast) -> str:
    """A sentence about what a step loses most by: the pipeline's filling and emptying, ranks that
    compute longer than others, messages, the reduction of gradients, recomputation, or what members
    of a stage tell one another."""
    step, ranks = forecast.step_seconds, forecast.by_rank
    if not (step and ranks):
        return "nothing is computed"
    longest = max(ranks, key=lambda rank: rank.computing_seconds)
    mean = sum(rank.computing_seconds for rank in ranks) / len(ranks)
    carried = [wait for wait in forecast.waits if wait.kind == "messages"]
    messages = sum(wait.seconds for wait in carried)
    reduced = sum(wait.seconds for wait in forecast.waits if wait.kind == "reduces")
    again = _seconds_in(forecast, longest, "again_seconds")
    telling = _seconds_in(forecast, longest, "telling_seconds")
    joined = "the replicas" if forecast.replicas > 1 else "the members"
    both = "parameters are told and gradients reduced"
    told = both if forecast.members > 1 else "gradients are reduced"
    may_share = forecast.replicas > 1 and not forecast.shared_out
    more = ", or a data_parallel of shard for the replicas" if may_share else ""
    # What is left of the step of the rank that computes longest.
    filling = step - longest.computing_seconds - messages - reduced
    # One sentence, about the largest loss: advice on all of them is a report, and the losses
    # overlap, so that their sum would promise more than there is.
    seconds_of = {  # what may be done, and the seconds that it is about
        _of_filling(forecast, filling / step): filling,
        _of_uneven(forecast, longest, mean): longest.computing_seconds - mean - again,
        _of_messages(carried, messages / step): messages,
        f"{told} for {reduced / step:.0%} of the step: join {joined} by faster links, or take more "
        "microbatches a step": reduced,
        f"rank {longest.rank} computes again for {again / step:.0%} of the step, to fit into its "
        "memory: take ranks with more of it, more ranks a pipeline, or more members a stage"
        f"{more}": again,
        f"members of a stage wait for one another for {telling / step:.0%} of the step: take fewer "
        f"than {forecast.members} members a stage, or a faster link between them": telling,
    }
    most = max(seconds_of, key=lambda text: seconds_of[text])
    if seconds_of[most] < _LITTLE * step:
        return (
            f"ranks compute for {mean / step:.0%} of the step: only more or faster ones make it "
            "much shorter"
        )
    return most


def _seconds_in(forecast: Forecast, rank: RankForecast, what: str) -> float:
    """The seconds of a step in which a rank recomputes, or its members tell one another."""
    count = forecast.microbatches // forecast.replicas
    own = (stage for stage in forecast.stages if stage.rank == rank.rank)
    return count * sum(getattr(stage, what) for stage in own)


def _of_filling(forecast: Forecast, share: float) -> str:
    count = forecast.microbatches // forecast.replicas
    text = (
        f"the pipeline fills and empties for {share:.0%} of the step: take more than {count} "
        f"microbatches for {forecast.ranks} ranks"
    )
    if forecast.gap is not None and forecast.gap > _LITTLE:
        text += (
            ", or search a schedule, which may save "
            f"{forecast.gap / (1 + forecast.gap):.0%} at most"
        )
    elif forecast.schedule in _WHOLE_BACKWARDS:
        text += ", or a schedule that splits backwards, such as zb-h1"
    return text


def _of_uneven(forecast: Forecast, rank: RankForecast, mean: float) -> str:
    own = [stage for stage in forecast.stages if stage.rank == rank.rank]
    layers = ", ".join(f"{stage.first} to {stage.last}" for stage in own[:2])
    text = f"rank {rank.rank} computes {rank.computing_seconds / (mean or 1):.1f} times as long as "
    text += f"the mean ({layers}): "
    if all(stage.clusters == 1 for stage in own):
        return f"{text}that cannot be cut further, so take fewer ranks in a pipeline"
    more = "" if len(forecast.stages) > forecast.ranks else ", or two stages a rank (interleaved)"
    return f"{text}take fewer ranks in a pipeline{more}"


def _of_messages(carried: list[Wait], share: float) -> str:
    most = carried[0].what if carried else ""
    where = most.removesuffix(" carries messages")
    return (
        f"messages take {share:.0%} of the step, {where} most: a faster link there, a cut where "
        "less is sent (cut_at blocks), or fewer ranks in a pipeline"
    )
