"""What an engine holds and sends, from its layout: the accounts of csrc/engine.c, bucket.c and engine_stage3.c."""

from zero_c._plan_layout import all_units, gathered, slot_bytes
from zero_c._plan_model import MASTER_BYTES, PARAM_BYTES, Counted

WINDOWS = {"cpu": 16, "cuda": 3}  # in flight: zc_engine_config.ring_slots
SCRATCH_WINDOWS = 4  # ENGINE_SCRATCH_SLOTS
SLOT_STEP_BYTES = {"cpu": 4096, "cuda": 2 << 20}  # in which slots take memory; cuda: of the GPUs up to now
# device_segment + optim_segment_scalars of a parameter; device_span; device_stats without its counters; device_step + flags
PARAMETER_BYTES, SPAN_BYTES, STATS_BYTES, STEP_BYTES = 16 + 120, 24, 560, 36
TALLY_BYTES = {"cpu": 0, "cuda": 104}  # device_tally
KINDS = ("parameters", "gradients", "master", "optimizer_state", "buffers")  # of opt.memory(), which adds the total


def memory(layout, settings):
    """Bytes that opt.memory() shows on this rank before a step, the total included."""
    stage, ranks = layout.stage, layout.ranks
    held = dict.fromkeys(KINDS, 0)
    share = 1 if stage == 0 else ranks
    for space in layout.spaces:
        kept = space.total * space.param_bytes // (ranks if stage == 3 else 1)
        held["parameters"] += kept // ranks if settings.shared_params else kept
        if space.frozen:
            continue
        shard_bytes = space.most_shard * space.sum_bytes
        if stage == 1:
            held["gradients"] += space.total * space.param_bytes
            if space.param_bytes < space.sum_bytes:
                held["buffers"] += min(space.buckets, SCRATCH_WINDOWS) * shard_bytes
        else:
            held["buffers"] += min(space.buckets, WINDOWS[settings.device]) * space.most_shard * ranks * space.param_bytes
        if stage != 1 or settings.backwards > 1:  # stage 1: only a second backward needs the windows again
            held["gradients"] += space.total // share * space.sum_bytes
        held["master"] += space.total // share * MASTER_BYTES[space.dtype]
        held["optimizer_state"] += space.total // share * settings.states * space.sum_bytes
        held["buffers"] += space.spans * SPAN_BYTES
    trained = [space for space in layout.spaces if not space.frozen]
    largest = max((space.most_shard * space.param_bytes for space in trained), default=0)
    if stage == 0 and settings.shared_params:
        held["buffers"] += largest
    if settings.device == "cuda" and ranks > 1:
        held["buffers"] += ranks * largest  # NCCL: where slices arrive to be added up in rank order
    held["buffers"] += slot_bytes(layout, settings.slots, SLOT_STEP_BYTES[settings.device])
    held["buffers"] += layout.parameters * PARAMETER_BYTES + 2 * 8 * stats_words(layout) + STEP_BYTES
    held["buffers"] += TALLY_BYTES[settings.device]
    return held | {"total": sum(held.values())}


def stats_words(layout):
    """64-bit words of a step's small all-reduce: statistics, and 16 bits for each parameter."""
    return STATS_BYTES // 8 + -(-layout.parameters // 4)


def traffic(layout, settings):
    """What opt.traffic() shows for a step: calls, payload in elements with padding, and bytes that this rank would send
    on a wire, (N-1)/N of the payload."""
    stage, ranks, backwards = layout.stage, layout.ranks, settings.backwards
    trained = [space for space in layout.spaces if not space.frozen]

    def row(calls, payload, whole_bytes):
        return {"calls": calls, "payload": payload, "bytes": whole_bytes // ranks * (ranks - 1)}

    reduced = row(backwards * sum(space.buckets for space in trained), backwards * sum(space.total for space in trained),
                  backwards * sum(space.total * space.param_bytes for space in trained))
    if stage == 3:
        elements, size, calls, _ = gathered(layout, settings.slots, backwards)
        everyone = row(calls, elements, size)
    elif stage > 0 and settings.shared_params:
        everyone = row(0, 0, 0)
    else:  # stage 0 gathers the reduced gradient
        everyone = row(sum(space.buckets for space in trained), sum(space.total for space in trained),
                       sum(space.total * (space.sum_bytes if stage == 0 else space.param_bytes) for space in trained))
    small = {"calls": 1, "payload": stats_words(layout), "bytes": 8 * stats_words(layout) * (ranks - 1)}
    return {"reduce_scatter": reduced, "all_gather": everyone, "broadcast": row(0, 0, 0), "small": small,
            "bytes": reduced["bytes"] + everyone["bytes"]}


def backward_bytes(model):
    """Gradients of the largest unit, which autograd makes while the engine takes them: not in opt.memory()."""
    if isinstance(model, Counted):
        sizes = [model.root, *(elements for elements, _ in model.unit_sizes())]
        return max(sizes) * PARAM_BYTES[model.dtype]
    by_unit = {}
    for param in model.params:
        if not param.frozen:
            by_unit[param.unit] = by_unit.get(param.unit, 0) + param.elements * PARAM_BYTES[param.dtype]
    return max(by_unit.values(), default=0)


def outside_bytes(model, stage):
    """What torch keeps for good beside the engine: module buffers, and below stage 3 frozen parameters."""
    if isinstance(model, Counted):
        return 0
    frozen = sum(param.elements * PARAM_BYTES[param.dtype] for param in model.params if param.frozen)
    return model.outside_bytes + (frozen if stage < 3 else 0)


def paper_bytes(elements, ranks, stage, k=12):
    """The ZeRO paper's figure for a 16-bit model (section 5 and figure 1 of arXiv 1910.02054): 2 bytes a parameter, 2 a
    gradient, k for the optimizer (mixed-precision Adam: 12), of which the stage's share is divided by the ranks."""
    whole, parted = ((4 + k, 0), (4, k), (2, 2 + k), (0, 4 + k))[stage]
    return whole * elements + parted * elements / ranks
