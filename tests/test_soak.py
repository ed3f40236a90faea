"""Ten minutes that stand for four hours: everything a long run does, again and again, exact to the bit, and nothing grows.

What wears a run out is not time but how often things are done, so that is what is counted. Four hours of a model that needs its
state sharded, at two seconds a step, are 7200 steps; with a save every quarter of an hour, 16 saves, and one start. Here the
model is so small that a step takes milliseconds: the soak ends when ten minutes *and* 7200 steps are over, and by then has
made hundreds of saves, loads, optimizers, communicators and changes of the number of ranks (rank_soak.py; it prints how many).
What a leak would lose in four hours, it has lost by then.
"""

import os

import pytest

torch = pytest.importorskip("torch")

import rank_soak  # noqa: E402
from ranks import RankGroup  # noqa: E402

FOUR_HOURS_STEPS = 4 * 3600 // 2
# How much more may be held at the end than after the first tenth: the heap once grows by 2 MB, as something is used that was not
# before; addresses and pages come and go with threads; of all else not one.
ROOM = {"heap_bytes": 5 << 19, "objects": 3000, "resident_bytes": 8 << 20, "mappings": 40}
KINDS = {*(f"stage {stage}" for stage in range(4)), "steps", "skipped steps", "saves", "save", "async_save", "load", "loads", "joins", "profiles", "looks",
         "trainings of arrays", "checks of every bit"}




def grown(held):
    """Of one rank's rows of HELD: what there is more of at the end than there may be, each with both numbers."""
    part = max(len(held) // 10, 4)  # cycles differ: in each part are some of all stages
    first, last = held[part:2 * part].max(axis=0), held[-part:].max(axis=0)
    both = dict(zip(rank_soak.HELD, zip(first.tolist(), last.tolist(), strict=True), strict=True))
    print(", ".join(f"{what} {before}, {after} at the end" for what, (before, after) in both.items()))
    return {what: (before, after) for what, (before, after) in both.items() if after > before + ROOM.get(what, 0)}


@pytest.mark.parametrize(("ranks", "seconds", "steps", "cycles", "most_steps"), [
    (2, 0, 0, 12, 4), pytest.param(3, 600, FOUR_HOURS_STEPS, 0, 60, marks=pytest.mark.long)], ids=["seconds", "four hours"])
def test_nothing_wears_out(ranks, seconds, steps, cycles, most_steps, tmp_path):
    shared = sorted(os.listdir("/dev/shm"))
    with RankGroup(ranks) as group:
        of_ranks = group.run(rank_soak.soak, 1, seconds, steps, cycles, most_steps, str(tmp_path), deadline=2 * seconds + 120)
    assert sorted(os.listdir("/dev/shm")) == shared
    counts = of_ranks[0]["counts"]
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    assert counts.keys() >= KINDS | {f"{n} ranks" for n in range(1, ranks + 1)}
    for rank, of_rank in enumerate(of_ranks):
        assert not grown(of_rank["held"]), f"rank {rank}"


def test_what_is_lost_is_found(tmp_path):
    """Each kind, a little in each cycle. (What a save leaves in its folder, the cycle itself finds.)"""
    lost = [what for what in rank_soak.HELD if what != "files"]
    with RankGroup(1) as group:
        of_rank, = group.run(rank_soak.soak, 1, 0, 0, 12, 4, str(tmp_path), lost, deadline=120)
    assert grown(of_rank["held"]).keys() == set(lost)
