"""Draws all families of schedules: python docs/pictures.py, which writes docs/pictures/*.svg."""

from pathlib import Path

from pfeife import report, sched

FOLDER = Path(__file__).parent / "pictures"
RANKS, MICROBATCHES = 4, 8
TWO_STAGES = ("interleaved", "breadth-first", "loops")  # a rank; those on a V have them anyway


def main() -> None:
    """One picture a family, on four ranks."""
    FOLDER.mkdir(exist_ok=True)
    for name, family in sched.POLICIES.items():
        chosen = family.bind(loop_batch=RANKS, prefetch=1) if name == "loops" else family
        on_a_v = family.placement is sched.families.folded
        stages = RANKS * (2 if on_a_v or name in TWO_STAGES else 1)
        ranks = family.placement(stages, RANKS)
        schedule = chosen(stages, MICROBATCHES, ranks)
        report.picture(schedule, FOLDER / f"{name}.svg", title=str(chosen))


if __name__ == "__main__":
    main()
