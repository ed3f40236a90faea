"""Where every parameter lies and what each rank owns of it: the layout of csrc/partition.c and engine_plan.c, and the
rings of engine_stage3.c, worked out without an engine.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from zero_c._plan_model import PARAM_BYTES, ROOT, SUM_BYTES, Counted, Unit

ALIGN = 64  # PARTITION_ALIGN_ELEMS
# What the engine chooses by itself (csrc/engine_plan.c): parts of the gradient in a window, its least and most bytes.
WINDOWS_BYTES = {"cpu": (128, 256 << 10, 1 << 20), "cuda": (8, 1 << 20, 25 << 20)}


@dataclass(frozen=True)
class Space:
    """The parameters of one dtype: a flat space in buckets, of which every rank owns a shard."""

    dtype: str
    frozen: bool
    total: int         # with padding
    buckets: int
    most_shard: int    # of the largest bucket
    spans: int         # pieces of parameters in what one rank updates

    @property
    def param_bytes(self):
        return PARAM_BYTES[self.dtype]

    @property
    def sum_bytes(self):
        return SUM_BYTES[self.dtype]


@dataclass
class Gather:
    """`count` units of one size, one after the other."""

    unit: Unit
    count: int = 1
    elements: int = 0  # of each, with padding
    bytes: int = 0
    buckets: int = 0


@dataclass
class Layout:
    """Where everything lies, at one stage."""

    stage: int
    ranks: int
    spaces: list
    parameters: int                                # the engine knows of
    gathers: list = field(default_factory=list)    # stage 3


# ---- laying out ------------------------------------------------------------------


def round_up(number, step):
    return -(-number // step) * step


def full_bucket(bucket_bytes, space_bytes, size, ranks, device):
    """Elements of a bucket in a space that has room for it."""
    step = ALIGN * ranks
    parts, least, most = WINDOWS_BYTES[device]
    bucket_bytes = bucket_bytes or min(max(space_bytes // parts, least), most)
    return max(bucket_bytes // size // step * step, step)


def lay_out(model, stage, ranks, bucket_bytes=0, rank=0, device="cpu"):
    """The Layout of a model as rank `rank` has it; ranks differ in `spans` only. bucket_bytes 0: chosen by size."""
    if isinstance(model, Counted):
        return lay_out_counted(model, stage, ranks, bucket_bytes, device)
    params = [param for param in model.params if stage == 3 or not param.frozen]
    kinds = sorted({(param.frozen, list(PARAM_BYTES).index(param.dtype), param.dtype) for param in params})
    layout = Layout(stage, ranks, [], len(params))
    gathers = [Gather(unit) for unit in model.units]
    for frozen, _, dtype in kinds:
        members = [param for param in params if (param.frozen, param.dtype) == (frozen, dtype)]
        if stage == 3:
            layout.spaces.append(_space_of_units(members, gathers, ranks, bucket_bytes, rank, device))
        else:
            layout.spaces.append(_flat_space(members, stage, ranks, bucket_bytes, rank, device))
    layout.gathers = [each for each in gathers if each.bytes]
    return layout


def _flat_space(members, stage, ranks, bucket_bytes, rank, device):
    """Stages 0 to 2: the last parameter first, in windows of one size."""
    dtype, size, used, places = members[0].dtype, PARAM_BYTES[members[0].dtype], 0, []
    for param in reversed(members):
        if param.elements:
            places.append([used, used + round_up(param.elements, ALIGN)])
            used = places[-1][1]
    if not places:
        return Space(dtype, False, 0, 0, 0, 0)
    total = places[-1][1] = round_up(used, ALIGN * ranks)
    bucket = min(full_bucket(bucket_bytes, used * size, size, ranks, device), total)
    starts = range(0, total, bucket)
    spans = _all_spans(places, starts, total, ranks) if stage == 0 else _own_spans(places, starts, total, ranks, rank)
    return Space(dtype, False, total, len(starts), bucket // ranks, spans)


def _space_of_units(members, gathers, ranks, bucket_bytes, rank, device):
    """Stage 3: the last unit first; each begins and ends with a bucket, and is cut as equally as possible."""
    dtype, frozen, step = members[0].dtype, members[0].frozen, ALIGN * ranks
    size, used, places, ends = PARAM_BYTES[dtype], 0, [], []
    by_unit = {}
    for param in members:
        if param.elements:
            by_unit.setdefault(param.unit, []).append(param.elements)
    for number in reversed(by_unit):
        begin = used
        for elements in reversed(by_unit[number]):
            places.append([used, used + round_up(elements, ALIGN)])
            used = places[-1][1]
        used = places[-1][1] = begin + round_up(used - begin, step)
        ends.append((number, begin, used))
    most = full_bucket(bucket_bytes, used * size, size, ranks, device)
    starts = []
    for number, begin, end in ends:
        pieces = -(-(end - begin) // most)
        starts += [begin + (end - begin) // step * piece // pieces * step for piece in range(pieces)]
        gathers[number].elements += end - begin
        gathers[number].bytes += (end - begin) * size
        gathers[number].buckets += pieces
    most_shard = max((end - begin for begin, end in zip(starts, [*starts[1:], used])), default=0) // ranks
    spans = 0 if frozen else _own_spans(places, starts, used, ranks, rank)
    return Space(dtype, frozen, used, len(starts), most_shard, spans)


def _bucket_of(starts, total, elem):
    """(number, begin, end) of the bucket with this element."""
    number = bisect_right(starts, elem) - 1
    return number, starts[number], starts[number + 1] if number + 1 < len(starts) else total


def _own_spans(places, starts, total, ranks, rank):
    """Into how many pieces this rank's slices of all buckets cut the parameters."""
    count = 0
    for begin, end in places:
        first, last = _bucket_of(starts, total, begin), _bucket_of(starts, total, end - 1)
        count += max(0, last[0] - first[0] - 1)  # a bucket that lies within a parameter has a piece for everyone
        for _, low, high in {first, last}:
            share = (high - low) // ranks
            own = low + rank * share, low + (rank + 1) * share
            count += max(own[0], begin) < min(own[1], end)
    return count


def _all_spans(places, starts, total, ranks):
    """Into how many pieces the slices of all ranks cut them."""

    def slice_of(elem):
        number, low, high = _bucket_of(starts, total, elem)
        return number * ranks + (elem - low) // ((high - low) // ranks)

    return sum(slice_of(end - 1) - slice_of(begin) + 1 for begin, end in places)


def lay_out_counted(model, stage, ranks, bucket_bytes=0, device="cpu"):
    """The same in a few steps, whatever the number of elements: one parameter, at stage 3 one for each unit."""
    size, step = PARAM_BYTES[model.dtype], ALIGN * ranks
    if stage < 3:
        used = round_up(model.elements, ALIGN)
        total = round_up(used, step)
        bucket = min(full_bucket(bucket_bytes, used * size, size, ranks, device), total)
        buckets = -(-total // bucket)
        space = Space(model.dtype, False, total, buckets, bucket // ranks, buckets * (ranks if stage == 0 else 1))
        return Layout(stage, ranks, [space], 1)
    parts = ([(ROOT, model.root, 1)] if model.root else []) + [
        (Unit(), elements, count) for elements, count in model.unit_sizes()]
    total = sum(round_up(elements, step) * count for _, elements, count in parts)
    most, gathers, most_shard = full_bucket(bucket_bytes, total * size, size, ranks, device), [], 0
    for unit, elements, count in parts:
        elements = round_up(elements, step)
        pieces = -(-elements // most)
        most_shard = max(most_shard, -(-elements // step // pieces) * ALIGN)
        gathers.append(Gather(unit, count, elements, elements * size, pieces))
    buckets = sum(each.buckets * each.count for each in gathers)
    return Layout(stage, ranks, [Space(model.dtype, False, total, buckets, most_shard, buckets)],
                  sum(each.count for each in gathers), gathers)


# ---- rings of stage 3 ---------------------------------------------------------------


def rings(layout, slots):
    """The units that take turns, as lists of Gather: at each level one ring for each size class, and its slots."""
    found, left = [], [each for each in layout.gathers if not each.unit.resident]
    for level in sorted({each.unit.level for each in left}):
        of_level = [each for each in left if each.unit.level == level]
        while of_level:
            least = max(each.bytes for each in of_level) // 2
            ring = [each for each in of_level if each.bytes > least]
            of_level = [each for each in of_level if each.bytes <= least]
            found.append((ring, min(slots, sum(each.count for each in ring))))
    return found


def slot_bytes(layout, slots, step):
    """Memory into which units are gathered."""
    alone = sum(round_up(each.bytes, step) for each in layout.gathers if each.unit.resident)
    return alone + sum(count * round_up(max(each.bytes for each in ring), step) for ring, count in rings(layout, slots))


def _some(ring, count):
    """(elements, bytes, gathers, buckets) of the first `count` units of a list."""
    found = [0, 0, 0, 0]
    for each in ring:
        taken = min(count, each.count)
        count -= taken
        for k, number in enumerate((each.elements, each.bytes, 1, each.buckets)):
            found[k] += taken * number
    return found


def all_units(layout):
    return _some(layout.gathers, float("inf"))


def gathered(layout, slots, backwards):
    """(elements, bytes, gathers, buckets) that `backwards` forwards and backwards gather from one step to the next.

    Every unit runs once forward, in order, and once backward. What is still in its slot is not gathered again: the root
    until the step, and the units that a ring held last when the direction turns.
    """
    everything = all_units(layout)
    root = _some([each for each in layout.gathers if each.unit.resident], float("inf"))
    turns = [(_some(reversed(ring), count), _some(ring, count)) for ring, count in rings(layout, slots)]
    last = [sum(numbers) for numbers in zip(root, *(turn[0] for turn in turns))]
    first = [sum(numbers) for numbers in zip(root, *(turn[1] for turn in turns))]
    return [one + (backwards - 1) * (one - begin) + backwards * (one - end)
            for one, begin, end in zip(everything, first, last)]
