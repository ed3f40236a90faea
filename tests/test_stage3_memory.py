"""What stage 3 holds and what it sends, exactly, and what the operating system sees of it.

Traffic, in elements with padding, N ranks. Psi: all parameters; T: those that are trained; `there`: those that are
gathered already when forward turns into backward, which are the root's and, of each ring of k slots, its last k units.

    one backward     Psi gathered for forward, Psi - there for backward, T reduced:  3 Psi - there  if all are trained
    the next ones    the same without the root and the first k units of each ring, which the backward before has left
    step()           nothing: no parameter is sent back, the next forward gathers it
    bytes            (N-1)/N of the payload

A unit that no gradient passes through has no backward, and is not gathered for it.

Memory, in bytes: p a parameter, s a sum (4; 8 for float64), m a master (bfloat16 2, float16 4), Adam:

    (p + s + m + 2 s) / N a trained parameter, p / N a frozen one, with the padding of every unit to 64 N elements
    + slots: the root's, and for each size class of units of a level as many as `prefetch` + 1, of the largest's size
    + the ring of windows through which gradients are reduced
    + some words for each parameter and for each bucket
"""

import numpy
import pytest
import rank_stage3_memory
from ranks import rank_groups, run_ranks
from stage3_models import CASES

PARAM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
MASTER_BYTES = {"float32": 0, "float64": 0, "bfloat16": 2, "float16": 4}
WINDOWS = 16
SLOT_STEP = 4096  # memory is mapped in pages
# What csrc/device.h and csrc/optim.h keep for each parameter (device_segment, optim_segment_scalars), for each piece of
# one in a bucket (device_span), and for a step (device_stats without its counters, twice; device_step; flags).
SEGMENT, SCALARS, SPAN, STATS, STEP = 16, 120, 24, 8 * 70, 32 + 4

# Larger and smaller units by turns: two size classes; width 12 makes none of them a multiple of 64 elements.
EQUAL, UNEQUAL = [20] * 6, [40, 7, 41, 6, 39, 5, 44]
SETTINGS = [{"prefetch": 0}, {"prefetch": 1}, {"prefetch": 2}, {"prefetch": 0, "ring": 2}, {"prefetch": 1, "ring": 4}]


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups()


def up(number, step):
    return -(-number // step) * step


def sum_bytes(dtype):
    return 8 if dtype == "float64" else 4


def slots_of(setting):
    return setting.get("ring") or setting["prefetch"] + 1


# ---- the plan, once more -------------------------------------------------------------------


class Plan:
    """The units of one model on N ranks, worked out from what the engine was given."""

    def __init__(self, layout, ranks, slots):
        self.ranks, self.units, self.params = ranks, layout["units"], layout["params"]
        self.spaces = sorted({(dtype, frozen) for _, elems, dtype, frozen in self.params})
        self.bytes = [sum(self.padded(unit, *space) * PARAM_BYTES[space[0]] for space in self.spaces)
                      for unit in range(len(self.units))]
        self.slots, self.rings = [], []  # bytes of each slot; units of each ring, and how many slots it has
        for unit, (_, _, resident) in enumerate(self.units):
            if resident and self.bytes[unit]:
                self.slots.append(self.bytes[unit])
        for level in sorted({level for _, level, _ in self.units}):
            left = [unit for unit, (_, at, resident) in enumerate(self.units)
                    if at == level and not resident and self.bytes[unit]]
            while left:
                largest = max(self.bytes[unit] for unit in left)
                ring = [unit for unit in left if self.bytes[unit] > largest // 2]
                left = [unit for unit in left if unit not in ring]
                self.rings.append((ring, min(slots, len(ring))))
                self.slots += [largest] * min(slots, len(ring))

    def padded(self, unit, dtype, frozen):
        """Elements of a unit in the space of this dtype."""
        used = sum(up(elems, 64) for at, elems, kind, cold in self.params if (at, kind, cold) == (unit, dtype, frozen))
        return up(used, 64 * self.ranks)

    def total(self, dtype, frozen):
        return sum(self.padded(unit, dtype, frozen) for unit in range(len(self.units)))

    def elements(self, units=None, frozen=(False, True)):
        units = range(len(self.units)) if units is None else units
        return sum(self.padded(unit, dtype, cold) for unit in units for dtype, cold in self.spaces if cold in frozen)

    def buckets(self, dtype, bucket_bytes):
        """The buckets of a space as (begin, end), and its parameters as (offset, end): units in the reverse order of
        their first parameters, in each the parameter last registered first."""
        of = [(index, unit, elems) for index, (unit, elems, kind, frozen) in enumerate(self.params)
              if (kind, frozen) == (dtype, False) and elems]
        size = PARAM_BYTES[dtype]
        bucket_bytes = bucket_bytes or min(max(self.total(dtype, False) * size // 128, 256 << 10), 1 << 20)
        step = 64 * self.ranks
        most = max(bucket_bytes // size // step * step, step)
        buckets, places, at = [], [], 0
        for unit in reversed(list(dict.fromkeys(unit for _, unit, _ in of))):
            begin = at
            for _, _, elems in sorted((entry for entry in of if entry[1] == unit), reverse=True):
                places.append([at, at + up(elems, 64)])
                at = places[-1][1]
            at = places[-1][1] = begin + up(at - begin, step)
            pieces = -(-(at - begin) // most)
            cuts = [begin + (at - begin) // step * piece // pieces * step for piece in range(pieces + 1)]
            buckets += zip(cuts[:-1], cuts[1:])
        return buckets, places

    def memory(self, rank, bucket_bytes=0):
        """What memory() must say."""
        count, trained = len(self.params), [dtype for dtype, frozen in self.spaces if not frozen]
        kept = {dtype: self.total(dtype, False) // self.ranks for dtype in trained}
        fixed = count * (SEGMENT + SCALARS) + 2 * (STATS + 8 * -(-count // 4)) + STEP
        windows = spans = 0
        for dtype in trained:
            buckets, places = self.buckets(dtype, bucket_bytes)
            if buckets:
                windows += min(WINDOWS, len(buckets)) * max(end - begin for begin, end in buckets) * PARAM_BYTES[dtype]
            for begin, end in buckets:
                share = (end - begin) // self.ranks
                own = begin + rank * share, begin + (rank + 1) * share
                spans += sum(max(place[0], own[0]) < min(place[1], own[1]) for place in places)
        held = {
            "parameters": sum(self.total(*space) // self.ranks * PARAM_BYTES[space[0]] for space in self.spaces),
            "gradients": sum(kept[dtype] * sum_bytes(dtype) for dtype in trained),
            "master": sum(kept[dtype] * MASTER_BYTES[dtype] for dtype in trained),
            "optimizer_state": sum(kept[dtype] * 2 * sum_bytes(dtype) for dtype in trained),
            "buffers": sum(up(slot, SLOT_STEP) for slot in self.slots) + windows + spans * SPAN + fixed,
        }
        return held | {"total": sum(held.values())}, windows


# ---- what is sent ----------------------------------------------------------------------------


def gathered(plan, backwards, visited):
    """(elements, gathers) of this many forwards and backwards from one step to the next; visited: the units that have
    a backward."""
    root = [unit for unit, (_, _, resident) in enumerate(plan.units) if resident]
    last = [unit for ring, slots in plan.rings for unit in ring[-slots:]]
    left = [unit for ring, slots in plan.rings for unit in ring[:slots] if unit in visited or slots == len(ring)]
    again = [unit for unit in range(len(plan.units)) if unit not in root + left]
    back = [unit for unit in visited if unit not in root + last]
    everything = list(range(len(plan.units)))
    return tuple(count(everything) + (backwards - 1) * count(again) + backwards * count(back)
                 for count in (plan.elements, len))


def check_traffic(row, n, plan, forwards, rounds, visited):
    """row: traffic() of what came before a step; `rounds` of its backwards were synchronised."""
    size = PARAM_BYTES["float32"]
    payload, calls = gathered(plan, forwards, visited)
    assert row["all_gather"] == {"calls": calls, "payload": payload, "bytes": payload * size * (n - 1) // n}
    reduced = rounds * plan.elements(frozen=(False,))
    assert row["reduce_scatter"]["payload"] == reduced
    assert row["reduce_scatter"]["bytes"] == reduced * size * (n - 1) // n
    assert row["broadcast"]["payload"] == row["broadcast"]["bytes"] == 0
    assert row["bytes"] == row["all_gather"]["bytes"] + row["reduce_scatter"]["bytes"]


def check_steps(rows, n, setting, rounds, deferred=0, visited=None):
    for row in rows:
        plan = Plan(row["layout"], n, slots_of(setting))
        units = range(len(plan.units)) if visited is None else visited
        for number, (seen, synchronised) in enumerate(zip(row["steps"], rounds, strict=True)):
            if number > 0 or len(units) == len(plan.units) or not setting["prefetch"]:
                check_traffic(seen["before"], n, plan, deferred + synchronised, synchronised, units)
            # otherwise units without a backward were fetched ahead: before the first step the order is a guess
            small = seen["step"].pop("small")
            assert small["calls"] >= 1
            assert not any(value for kind in seen["step"].values()
                           for value in (kind.values() if isinstance(kind, dict) else [kind])), (number, seen["step"])


@pytest.mark.parametrize("hidden", [EQUAL, UNEQUAL], ids=["one size class", "two size classes"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_traffic_of_a_backward(groups, n, hidden):
    """Per backward 3 Psi less what is there at the turn; k of them from step to step; also in the first step, whose
    order is guessed."""
    for setting in SETTINGS:
        rounds = [1, 1, 2, 3]
        rows = groups(n).run(rank_stage3_memory.traffic, hidden, [], setting, rounds, deadline=60)
        check_steps(rows, n, setting, rounds)
        plan = Plan(rows[0]["layout"], n, slots_of(setting))
        there = [0] + [unit for ring, slots in plan.rings for unit in ring[-slots:]]
        for row in rows:
            first = row["steps"][0]["before"]
            assert (first["all_gather"]["payload"] + first["reduce_scatter"]["payload"]
                    == 3 * plan.elements() - plan.elements(there))


def test_traffic_of_deferred_backwards(groups):
    """no_sync() spares reductions, not gathers."""
    for setting in SETTINGS[:2]:
        rows = groups(2).run(rank_stage3_memory.traffic, EQUAL, [], setting, [1, 1], deferred=2, deadline=60)
        check_steps(rows, 2, setting, [1, 1], deferred=2)


def test_traffic_with_buckets_of_any_size(groups):
    reductions = []
    for bucket_mb in (1e-6, 0.002, 1.0):
        rows = groups(2).run(rank_stage3_memory.traffic, UNEQUAL, [], SETTINGS[1], [1, 2], bucket_mb=bucket_mb,
                             deadline=60)
        check_steps(rows, 2, SETTINGS[1], [1, 2])
        reductions.append(rows[0]["steps"][0]["before"]["reduce_scatter"]["calls"])
    assert reductions[0] > reductions[1] > reductions[2], "these were to be buckets of several sizes"


@pytest.mark.parametrize("frozen, visited", [
    (["blocks.2"], range(7)),                           # its weights carry the gradient of what is before it
    (["blocks.2.up", "blocks.4.down.bias"], range(7)),
    (["enter", "blocks.0", "blocks.1"], [0, 3, 4, 5, 6]),    # nothing before them wants a gradient
    (["enter", "norm", "head"], range(7)),
], ids=str)
def test_frozen_parameters_are_gathered_and_not_reduced(groups, frozen, visited):
    for setting in SETTINGS:
        rows = groups(2).run(rank_stage3_memory.traffic, EQUAL, frozen, setting, [1, 1, 2], deadline=60)
        check_steps(rows, 2, setting, [1, 1, 2], visited=list(visited))
        plan = Plan(rows[0]["layout"], 2, slots_of(setting))
        assert 0 < plan.elements(frozen=(False,)) < plan.elements()


def test_clipping_changes_nothing(groups):
    plain, clipped = (groups(2).run(rank_stage3_memory.traffic, UNEQUAL, [], SETTINGS[1], [1, 2], deadline=60, **more)
                      for more in ({}, {"max_grad_norm": 0.01}))
    for row, other in zip(plain, clipped, strict=True):
        for seen, as_seen in zip(row["steps"], other["steps"], strict=True):
            assert seen["before"] == as_seen["before"]
            for each in (seen, as_seen):
                each["step"].pop("small")
            assert seen["step"] == as_seen["step"]


# ---- what is held ------------------------------------------------------------------------------


def check_memory(groups, n, names, setting, **options):
    bucket_bytes = int(options.get("bucket_mb", 0) * 2**20)
    for rank, row in enumerate(groups(n).run(rank_stage3_memory.memory, names, setting, deadline=120, **options)):
        for name, found in row.items():
            wanted, windows = Plan(found["layout"], n, slots_of(setting)).memory(rank, bucket_bytes)
            for memory in found["memory"]:
                assert memory == wanted, (name, rank, setting, options)
            assert found["ring_bytes"] == windows, (name, rank, setting, options)


VARIED = ["GPT", "GPT, tied", "GPT, mostly frozen", "GPT, two dtypes", "nested", "odd parameters", "experts", "ResNet"]


@pytest.mark.parametrize("n, names", [(1, VARIED), (2, list(CASES)), (3, VARIED)], ids=["1", "2", "3"])
def test_memory_is_the_formula(groups, n, names):
    """Every kind of model that stage 3 is tested with, to the byte."""
    check_memory(groups, n, names, SETTINGS[1])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_memory_with_every_ring(groups, setting):
    check_memory(groups, 2, VARIED, setting)


@pytest.mark.parametrize("bucket_mb", [1e-6, 0.002])
def test_memory_with_buckets_of_any_size(groups, bucket_mb):
    check_memory(groups, 2, VARIED, SETTINGS[1], bucket_mb=bucket_mb)


@pytest.mark.long
@pytest.mark.parametrize("bucket_mb", [1e-6, 0.002, 1.0])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_memory_of_every_model_in_every_way(groups, n, setting, bucket_mb):
    check_memory(groups, n, list(CASES), setting, bucket_mb=bucket_mb)


# ---- what the system sees ------------------------------------------------------------------------


def check_seen(n, units, width, **options):
    rows = run_ranks(n, rank_stage3_memory.seen_by_system, 3, units, width, 3, deadline=300, **options)
    elements = rows[0]["elements"]
    for row in rows:
        assert row["counted"] < elements * (16 / n) * 1.1, "a model so large that everything else is small beside it"
    # Of each rank the mean: a page that ranks share is counted for those of them that have touched it.
    seen, counted = (numpy.mean([row[name] for row in rows]) for name in ("end", "counted"))
    print(f"{n} ranks, {elements:,} parameters: {seen / elements:.3f} bytes each seen, {counted / elements:.3f} "
          f"counted; peaks {[round(row['peak'] / elements, 3) for row in rows]}")
    assert abs(seen - counted) <= 0.03 * counted, [(row["end"] / elements, row["counted"] / elements) for row in rows]
    return rows


def test_the_system_sees_what_the_engine_counts():
    """64 Mi parameters; Pss, after steps, without what malloc keeps."""
    check_seen(2, 64, 1024)


@pytest.mark.long
@pytest.mark.parametrize("n, prefetch", [(1, 1), (2, 0), (2, 3), (3, 1), (4, 1)])
def test_the_system_sees_what_the_engine_counts_anywhere(n, prefetch):
    check_seen(n, 64, 1024, prefetch=prefetch)


def test_trains_where_stage_2_has_no_room():
    """Four ranks that may take 6.5 bytes for each parameter of a model whose training takes 16; stage 2 takes 7, and
    what it needs to reduce.

    No limit that a process may set for itself counts what is meant here: RLIMIT_DATA leaves out shared memory,
    RLIMIT_AS counts every mapping of a page and every reservation. So Pss is read where it is highest, at each stage of
    a step and within backward, and when the model is built.
    """
    n, units, width, steps = 4, 64, 512, 2
    limit = 6.5 * units * width**2
    rows = {stage: run_ranks(n, rank_stage3_memory.seen_by_system, stage, units, width, steps, deadline=60)
            for stage in (3, 2)}
    assert limit < 16 * rows[3][0]["elements"]
    text = {stage: [(f"peak {row['peak'] / row['elements']:.2f}", f"counted {row['counted'] / row['elements']:.2f}")
                    for row in found] for stage, found in rows.items()}
    print(text)
    assert max(row["peak"] for row in rows[3]) <= limit, text
    assert min(row["counted"] for row in rows[2]) > limit, text
    assert numpy.mean([row["end"] for row in rows[2]]) > limit, text
    assert [row["losses"] for row in rows[2]] == [row["losses"] for row in rows[3]]
