"""What becomes of a pipeline when a rank fails: every fault at every action, real processes.

    python benchmarks/faults.py             all of it, some minutes
    python benchmarks/faults.py --quick     some of it, a minute
    python benchmarks/faults.py --quick --again 3 --reaction 30     what the tests run

Prints a line a fault: how many trials, how many ended right, and the slowest reaction, which is
the time from the fault (for silence: from when the timeout has passed) until the last survivor
knew, or had ended where nobody catches anything. Exits non-zero if a trial ended wrong. On a busy
machine a survivor may be ended before it tells its reason: with `--again` launches in which that is
all that was wrong, or that were slow, are done twice, unless more than so many ended wrong or slow;
what was wrong with them at first is printed.
"""

import argparse
import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from fault_ranks import (  # noqa: E402
    BATCHES,
    BUILDING,
    LATE,
    OPERATIONS,
    PATIENT,
    ROWS,
    SHORT,
    SKIPPED,
    SKIPPED_CALL,
    WAITING,
    Trial,
    arrive,
    compiled,
    end,
    idle,
    left_over,
    planning,
    recover,
    skipping,
)
from faulty import MANY, Case, case  # noqa: E402
from forked import Launch, Main  # noqa: E402

from pfeife import report  # noqa: E402
from pfeife.data.progress import shown  # noqa: E402

AT_ONCE = 6  # launches that run at the same time
REACTION = 10.0  # seconds in which every survivor has to end
SILENT = ("SIGSTOP", WAITING, LATE, "slow", SKIPPED)
AWAY = "away"  # outside of a step, for longer than the timeout


@attrs.frozen
class Outcome:
    """A trial that is over: what was wrong with it ("" if nothing), its reaction, and whether it is
    all explained by a survivor that had no time to tell its reason."""

    fault: str
    case: str
    wrong: str
    seconds: float
    untold: bool = False


class Untold(str):
    """What is wrong where a survivor has told nothing, and nobody has told what is not right."""


@attrs.frozen(eq=False)
class Plan:
    """A launch to be done, its trials, and how it is judged."""

    case: Case
    trials: Sequence[Trial]
    main: Main
    seconds: float
    judge: "Judge"
    agent: bool = True
    absent: tuple[int, ...] = ()


Judge = Callable[[Plan, Launch], list[Outcome]]


def heard_right(case: Case, trial: Trial, reported: dict[str, Any]) -> str:
    """What is wrong with a survivor's error, "" if nothing."""
    failure = reported.get("failure")
    if trial.fault == ROWS:
        return "" if reported["type"] == "CollectiveError" else f"not refused: {reported['text']}"
    if trial.fault == SKIPPED and reported["type"] == "CollectiveError":
        # Ranks meet at two calls, and are told which: the victim's is the next one.
        there = rf"rank {trial.victim} (is )?at the arguments of this call"
        named = re.search(there, reported["text"])
        return "" if named else f"rank {reported['rank']} blames another: {reported['text']}"
    if failure is None:
        return f"rank {reported['rank']} raised {reported['type']}: {reported['text']}"
    if failure["rank"] not in (trial.victim, trial.second):
        return f"rank {reported['rank']} blames another: {reported['text']}"
    if trial.fault in OPERATIONS and not trial.members:
        action = case.actions(failure["rank"])[trial.at]
        inside = trial.fault in ("exception", "out of memory")
        if inside and f"action {action} " not in failure["where"]:
            return f"rank {reported['rank']} names another action: {reported['text']}"
        if inside and case.operations(action) and "faulty.py" not in failure["source"]:
            return f"rank {reported['rank']} names no line of the model: {reported['text']}"
        microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
        places = [f"of stage {stage}{microbatch})" for stage in case.nearby(action.stage)]
        if not any(place in failure["where"] for place in places):
            return f"rank {reported['rank']} names another place: {reported['text']}"
    return "" if failure["cause"] else "no cause"


def judge_recovery(plan: Plan, launch: Launch) -> list[Outcome]:
    """All trials of one launch whose ranks catch what they hear of."""
    reports, outcomes = launch.reports(), []
    held: dict[int, dict[str, int]] = {}
    for number, trial in enumerate(plan.trials):
        mine = [r for r in reports if r.get("trial") == number]
        wrong = [_recovered(plan.case, trial, mine, held)]
        struck = [r["time"] for r in mine if r["event"] == "fault"]
        errors = [r["time"] for r in mine if r["event"] == "error"]
        seconds = max(errors) - struck[0] if struck and errors else 0.0
        outcomes.append(_outcome(plan, trial, wrong, seconds))
    codes = {rank: one.code for rank, one in launch.ranks.items() if one.code != 0}
    if codes:
        # A survivor that is given up ends itself with 1; those that miss it then do as well.
        given_up = set(codes.values()) == {1} and any(one.untold for one in outcomes)
        wrong = [(Untold if given_up else str)(f"exit codes {codes} at the end")]
        outcomes.append(_outcome(plan, plan.trials[-1], wrong, 0.0))
    return outcomes


def _recovered(case: Case, trial: Trial, reports: list[dict], held: dict[int, dict]) -> str:
    """What is wrong in the reports of a trial, "" if nothing."""
    errors = {r["rank"]: r for r in reports if r["event"] == "error"}
    again = {r["rank"]: r for r in reports if r["event"] == "again"}
    if any(not r["refused"] for r in reports if r["event"] == "asked again"):
        return "a failed step gave a result"
    if not all(r["same"] and r["clean"] for r in again.values()):
        return "the next step gave other bits, or the failed one changed the parameters"
    if len(errors) != case.size or (len(again) != case.size and not trial.chained):
        return Untold(f"only ranks {sorted(errors)} failed, ranks {sorted(again)} went on")
    for rank, one in errors.items():
        mine = rank in (trial.victim, trial.second) and trial.fault != ROWS
        said = "" if mine else heard_right(case, trial, one)
        if said:
            return said
    for rank, one in again.items():
        first = held.setdefault(rank, one)
        if left_over(one, first):
            return f"rank {rank} holds {one}, at first {first}"
    return ""


def judge_end(plan: Plan, launch: Launch) -> list[Outcome]:
    """A launch with one trial, in which nobody catches anything."""
    trial = plan.trials[0]
    reports = launch.reports()
    errors = {r["rank"]: r for r in reports if r["event"] == "error"}
    survivors = [rank for rank in launch.ranks if rank != trial.victim]
    wrong = []
    for rank in survivors:
        one = launch.ranks[rank]
        if rank not in errors:
            wrong.append(Untold(f"rank {rank}: heard nothing"))
        elif said := heard_right(plan.case, trial, errors[rank]):
            wrong.append(f"rank {rank}: {said}")
        if one.code != 1:
            wrong.append(f"rank {rank} ended with {one.code}")
    victim = launch.ranks.get(trial.victim)
    expected = {"SIGKILL": -signal.SIGKILL, "exit": 3, "SIGINT": -signal.SIGINT}
    expected |= {"left": 0, SKIPPED_CALL: 0}  # its script is over
    if victim and victim.code != expected.get(trial.fault, 1):
        wrong.append(f"the victim ended with {victim.code}")
    struck = [r["time"] for r in reports if r["event"] == "fault"]
    ended = max(launch.ranks[rank].ended for rank in survivors)
    silence = SHORT if trial.fault in SILENT or plan.absent else 0.0
    seconds = ended - (struck[0] if struck else ended) - silence
    return [_outcome(plan, trial, wrong, seconds)]


def judge_waited(plan: Plan, launch: Launch) -> list[Outcome]:
    """A launch with one trial, in which a rank comes late and all is well."""
    heard = [f"rank {r['rank']}: {r['text']}" for r in launch.reports() if r["event"] == "error"]
    codes = {rank: one.code for rank, one in launch.ranks.items() if one.code != 0}
    return [_outcome(plan, plan.trials[0], [*heard, f"exit codes {codes}" if codes else ""], 0.0)]


def _outcome(plan: Plan, trial: Trial, wrong: Sequence[str], seconds: float) -> Outcome:
    found = [one for one in wrong if one]
    at = f"rank {trial.victim}, {'collective' if trial.members else 'action'} {trial.at}"
    where = f"{plan.case.name} on {plan.case.size}"
    text = f"{trial.name}, {where}, {at}: {'; '.join(found)}" if found else ""
    untold = bool(found) and all(isinstance(one, Untold) for one in found)
    return Outcome(trial.name, where, text, seconds, untold)


def carry_out(
    plans: Sequence[Plan], launches: int = AT_ONCE
) -> Iterator[tuple[Plan, list[Outcome]]]:
    """All launches with their outcomes as they end; so many `launches` run at the same time."""
    todo, running = list(reversed(plans)), dict[Launch, Plan]()
    gc.collect()
    gc.freeze()  # what is there now costs the ranks nothing, not even when they end
    while todo or running:
        while todo and len(running) < launches:
            plan = todo.pop()
            launch = Launch(
                plan.case.size,
                plan.main,
                seconds=plan.seconds,
                agent=plan.agent,
                absent=plan.absent,
            )
            running[launch] = plan
        time.sleep(0.01)
        for launch, plan in list(running.items()):
            over = launch.poll()
            trial = plan.trials[0]
            if launch.living() == [trial.victim] and trial.fault.startswith("SIGSTOP"):
                launch.signal(trial.victim, signal.SIGCONT)
            if over:
                del running[launch]
                outcomes = plan.judge(plan, launch)
                text = launch.close()
                if any(one.wrong for one in outcomes):
                    print(text[-9000:], file=sys.stderr)
                yield plan, outcomes


def recoveries(case: Case, trials: Sequence[Trial]) -> Plan:
    seconds = min(30 + 10 * len(trials), 300)
    return Plan(case, trials, recover(case, trials), seconds, judge_recovery)


def ending(
    case: Case, fault: str, victim: int, at: int, agent: bool = True, members: bool = False
) -> Plan:
    trial = Trial(fault, victim, at, members=members)
    timeout = SHORT if fault in SILENT else PATIENT
    return Plan(case, [trial], end(case, trial, timeout), 40, judge_end, agent)


def idling(case: Case, fault: str, victim: int, agent: bool = True) -> Plan:
    trial = Trial(fault, victim)
    timeout = SHORT if fault == AWAY else PATIENT
    judge = judge_waited if fault == AWAY else judge_end
    return Plan(case, [trial], idle(case, trial, timeout), 40, judge, agent)


def missing(case: Case, victim: int, agent: bool = True) -> Plan:
    trial = Trial("never started", victim)
    return Plan(case, [trial], arrive(SHORT), 40, judge_end, agent, absent=(victim,))


def through_compile(case: Case) -> list[Plan]:
    """Faults while pfeife.compile captures, measures, plans and builds, and between its calls."""
    trials = [Trial(fault, victim) for fault in (BUILDING, ROWS) for victim in range(case.size)]
    plans = [Plan(case, trials, compiled(case, trials), 120, judge_recovery)]
    for fault in ("SIGKILL", "SIGINT"):
        for tenths in (2, 6, 12):
            trial = Trial(fault, 0, tenths)
            plans.append(Plan(case, [trial], planning(case, trial, PATIENT), 60, judge_end))
    return plans + skips(case, SKIPPED)


def skips(case: Case, fault: str, members: bool = False) -> list[Plan]:
    trials = [Trial(fault, victim, members=members) for victim in range(case.size)]
    return [Plan(case, [t], skipping(case, t, SHORT), 60, judge_end) for t in trials]


def among_members(case: Case) -> list[Plan]:
    """Faults in every collective of a group, and members that come to different calls."""
    ats = [(v, at) for v in range(case.size) for at in range(case.collectives(v))]
    plans = [recoveries(case, [Trial("exception", v, at, members=True) for v, at in ats])]
    for fault in ("SIGKILL", "SIGSTOP"):
        plans += [ending(case, fault, v, at, members=True) for v, at in ats]
    return plans + [p for fault in (SKIPPED, SKIPPED_CALL) for p in skips(case, fault, True)]


def at_once(case: Case) -> list[Trial]:
    """Two ranks that fail at the same time, and failures one after another."""
    both = [Trial("exception", 0, at, second=1) for at in range(0, len(case.actions(0)), 2)]
    actions = len(case.actions(0))
    chain = [Trial("exception", at % 2, at % actions, chained=at < 5) for at in range(6)]
    return both + chain


def every(case: Case, faults: Sequence[str], step: int = 1) -> list[Trial]:
    """The faults in all actions of all ranks (or in each `step`th one)."""
    found = [
        Trial(fault, victim, at)
        for victim in range(case.size)
        for at in range(len(case.actions(victim)))
        for fault in faults
        if fault == "exception" or case.operations(case.actions(victim)[at])
    ]
    return found[::step]


def quick() -> list[Plan]:
    """A minute's selection: exceptions everywhere, the rest here and there."""
    two, four = case("1f1b", 2, 2), case("1f1b", 4)
    faults = every(two, OPERATIONS)
    batches = [Trial(fault, victim) for fault in BATCHES for victim in range(2)]
    tied, large = case("1f1b", 2, 2, tied=True), case("1f1b", 2, 2, rows=MANY)
    reduce = [t for t in every(tied, ["exception"]) if "RED" in str(tied.actions(t.victim)[t.at])]
    return [
        recoveries(two, faults[::2] + batches + at_once(two)),
        *through_compile(two)[::3],
        recoveries(four, every(four, ["exception"], 12)),
        recoveries(tied, reduce),
        recoveries(large, every(large, ["exception"], 4)),
        *(ending(two, "SIGKILL", victim, at) for victim, at in [(0, -1), (1, 2)]),
        ending(four, "SIGKILL", 1, 7),
        ending(two, "SIGKILL", 0, 3, agent=False),
        ending(tied, "SIGKILL", 1, len(tied.actions(1)) - 2),
        ending(large, "SIGSTOP", 1, 3),
        ending(two, "SIGSTOP", 0, 3, agent=False),
        ending(four, "SIGSTOP", 2, 9),
        ending(two, WAITING, 0, len(two.actions(0)) - 3),
        ending(four, LATE, 0, -1),
        ending(two, "slow", 1, 3, agent=False),
        ending(two, "exit", 1, 2),
        ending(two, "SIGINT", 0, 2),
        idling(two, AWAY, 1),
        idling(two, "left", 0, agent=False),
        missing(two, 1),
        missing(two, 0, agent=False),
        *among_members(case("1f1b", 1, 2, members=2))[::12],
    ]


def full() -> list[Plan]:
    """Every fault at every action of every rank."""
    cases = [case("1f1b", 2), case("1f1b", 4), case("zb-v", 2), case("interleaved", 2)]
    cases += [case("1f1b", 2, tied=True), case("1f1b", 2, tied=True, replicas=2)]
    shared = [case("1f1b", stages, 2, members=2) for stages in (1, 2)]
    cases += [case("1f1b", 2, rows=MANY), *shared]
    plans = [plan for one in shared for plan in among_members(one)]
    for one in cases:
        faults = every(one, OPERATIONS)
        pieces = [faults[start : start + 60] for start in range(0, len(faults), 60)]
        plans += [recoveries(one, piece) for piece in pieces]
        victims = range(one.size)
        others = [Trial(f, v) for f in BATCHES for v in victims] + at_once(one)
        plans.append(recoveries(one, others))
        if one.name == "1f1b":
            plans += through_compile(one)
            plans.append(ending(one, WAITING, 0, len(one.actions(0)) - 3))
            plans.append(ending(one, LATE, 0, -1))
        for victim in victims:
            ats = range(-1, len(one.actions(victim)))
            whole = one.name == "1f1b"
            plans += [ending(one, "SIGKILL", victim, at) for at in ats]
            plans += [ending(one, "SIGSTOP", victim, at) for at in ats[:: 1 if whole else 6]]
            for fault in ("exit", "SIGINT"):
                plans += [ending(one, fault, victim, at) for at in ats[:: 3 if whole else 6]]
            inside = ats[1 :: 3 if whole else 6]  # who is slow outside of a step is AWAY
            plans += [ending(one, "slow", victim, at) for at in inside]
            plans += [idling(one, fault, victim) for fault in (AWAY, "left")]
            plans.append(missing(one, victim))
            plans.append(missing(one, victim, agent=False))
        plans += [ending(one, "slow", victim, 3, agent=False) for victim in victims if victim]
        alone = range(-1, len(one.actions(0)))
        plans += [
            ending(one, fault, 0, at, agent=False)
            for fault in ("SIGKILL", "SIGSTOP", "slow", "exit")
            for at in alone[fault == "slow" :: 2 if fault == "SIGKILL" else 6]
        ]
    return plans


Outcomes = Mapping[Plan, Sequence[Outcome]]  # of every launch


def once_more(outcomes: Outcomes, most: int, reaction: float) -> tuple[Outcomes, Outcomes]:
    """Does again, one by one, the launches that were slow or in which somebody was untold, where
    nothing else was wrong; none if more than `most` ended wrong or slow. Returns the outcomes that
    count, and the first ones of what was done again."""
    first = {p: o for p, o in outcomes.items() if any(failure(one, reaction) for one in o)}
    if len(first) > most:
        return outcomes, {}
    first = {p: o for p, o in first.items() if all(one.untold or not one.wrong for one in o)}
    return {**outcomes, **dict(carry_out(list(first), 1))}, first


def failure(one: Outcome, reaction: float) -> str:
    """Why a trial did not end as it has to, in time; "" if it did."""
    late = f"{one.fault}, {one.case}: a reaction took {one.seconds:.1f} s"
    return one.wrong or (late if one.seconds > reaction else "")


def table(outcomes: Sequence[Outcome], at_first: Sequence[str] = ()) -> str:
    """A row a fault and schedule; below it why launches were done twice."""
    rows = []
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.fault, one.case), []).append(one)
    for (fault, where), those in sorted(groups.items()):
        right = sum(not one.wrong for one in those)
        slowest = max(one.seconds for one in those)
        rows.append((fault, where, len(those), right, f"{slowest:.1f} s"))
    head = ("fault", "schedule on ranks", "trials", "right", "slowest reaction")
    return "\n".join([report.table(rows, head), *(f"done twice: {why}" for why in at_first)])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--only", help="faults whose name has this in it")
    arguments.add_argument("--case", help="schedules whose name has this in it")
    arguments.add_argument("--reaction", type=float, default=REACTION, help="the longest, seconds")
    arguments.add_argument("--again", type=int, default=0, help="launches that may be done twice")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    plans = quick() if options.quick else full()
    plans = [p for p in plans if (options.only or "") in p.trials[0].name]
    plans = [p for p in plans if (options.case or "") in f"{p.case.name} on {p.case.size}"]
    launches = dict[Plan, list[Outcome]]()
    total = sum(len(plan.trials) for plan in plans)
    start = time.monotonic()
    with shown(logging.getLogger("pfeife")).phase("trials") as phase:
        for plan, found in carry_out(plans):
            launches[plan] = found
            if phase.progress:
                phase.progress(sum(map(len, launches.values())), total)
        counted, first = once_more(launches, options.again, options.reaction)
    outcomes = [one for found in counted.values() for one in found]
    at_first = [failure(one, options.reaction) for found in first.values() for one in found]
    print(table(outcomes, [why for why in at_first if why]))
    wrong = [one.wrong for one in outcomes if one.wrong]
    slowest = max(one.seconds for one in outcomes)
    if slowest > options.reaction:
        wrong.append(f"a reaction took {slowest:.1f} s")
    print("\n".join(wrong))
    print(
        f"{len(outcomes)} trials, {len(wrong)} ended wrong, {len(first)} launches done twice, "
        f"slowest reaction {slowest:.1f} s, {time.monotonic() - start:.0f} s in all"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
