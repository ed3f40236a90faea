"""An estimate of a step's time: what each part takes by itself, and what of it runs beside something else.

A collective of V bytes, of which this rank sends (N-1)/N, takes

    latency * hops + V (N-1)/N / bandwidth        (the alpha-beta model)

where hops are the messages that wait for one another: N-1 around a ring, log2 N in a tree, and one where every rank
reads its peers' memory. The update takes the bytes that it must read and write over the memory's bandwidth.

Where communication runs beside computation (GPUs), two chains of n equal parts, the second of which follows the first
part by part, take max(A + C/n, A/n + C). Where a rank does everything itself (CPUs) they take A + C.

    forward    stage 3: units are gathered and computed, one chain after the other; without prefetch they add up
    backward   computed, and reduced bucket by bucket; at stage 3 also gathered unit by unit, on the same link
    step       the small all-reduce; then buckets are updated and gathered (stages 1 and 2), the sums gathered and all
               of it updated (stage 0), or only updated (stage 3)

Nothing else is in it: neither the time that a collective takes from a computation beside it, nor ranks that wait for a
slower one, nor Python. Activations and data loading belong to the compute times that are given.
"""

import math
from dataclasses import dataclass, replace

from zero_c._plan_layout import all_units, gathered
from zero_c._plan_memory import traffic
from zero_c._plan_model import MASTER_BYTES, one_of, positive

HOPS = {"ring": lambda ranks: ranks - 1, "tree": lambda ranks: math.ceil(math.log2(ranks)), "one": lambda ranks: 1}
FLOPS_FORWARD, FLOPS_BACKWARD = 2, 4  # for each parameter and token, of layers that are matrix products
LONGEST_S = 1e300  # of a step: a float holds it in milliseconds, too


@dataclass(frozen=True)
class Machine:
    """Speeds of one rank.

    latency_s: of one hop. reduce_bandwidth, gather_bandwidth: bytes that a rank sends in a second of a reduce-scatter
    and of an all-gather. memory_bandwidth: bytes a second, read or written, during the update. hops: a key of HOPS.
    overlap: communication runs beside computation.
    """

    latency_s: float
    reduce_bandwidth: float
    gather_bandwidth: float
    memory_bandwidth: float
    hops: str = "ring"
    overlap: bool = True

    def __post_init__(self):
        positive("latency", self.latency_s, zero=True)
        for name in ("reduce_bandwidth", "gather_bandwidth", "memory_bandwidth"):
            positive(name, getattr(self, name))
        one_of("hops", self.hops, HOPS)


@dataclass(frozen=True)
class StepTime:
    """Seconds. compute, reduce, gather, update: what each takes by itself, in all of the step. forward, backward, step:
    what passes on the clock; total is their sum, and waiting the part of it in which nothing is computed or updated."""

    compute: float
    reduce: float
    gather: float
    update: float
    forward: float
    backward: float
    step: float

    def __post_init__(self):
        if not self.total < LONGEST_S:
            raise ValueError(f"the time of a step would be {LONGEST_S:g} s or more; the speeds are too small, or the seconds too many")

    @property
    def total(self):
        return self.forward + self.backward + self.step

    @property
    def waiting(self):
        return self.total - self.compute - self.update


def compute_seconds(elements, tokens, flops):
    """(forward, backward) of one rank: 2 and 4 operations for each parameter and token."""
    each = elements * tokens / flops
    return FLOPS_FORWARD * each, FLOPS_BACKWARD * each


def update_bytes(layout, states):
    """What one rank's update reads and writes: parameter, master and state both, the sum once."""
    share = 1 if layout.stage == 0 else layout.ranks
    total = 0
    for space in layout.spaces:
        if not space.frozen:
            each = 2 * (space.param_bytes + MASTER_BYTES[space.dtype] + states * space.sum_bytes)
            total += space.total // share * (each + space.sum_bytes)
    return total


def chain(first, second, parts, overlap):
    """Two chains of equal parts, the second behind the first."""
    if not overlap or parts < 1:
        return first + second
    return max(first + second / parts, first / parts + second)


def step_time(layout, settings, machine, forward_s, backward_s):
    """StepTime of one forward, one backward and a step."""
    sent = traffic(layout, replace(settings, backwards=1))
    hops = HOPS[machine.hops](layout.ranks)

    def collective(operations, sent_bytes, bandwidth):
        return operations * hops * machine.latency_s + sent_bytes / bandwidth

    reduced = sent["reduce_scatter"]
    reduce = collective(reduced["calls"], reduced["bytes"], machine.reduce_bandwidth)
    update = update_bytes(layout, settings.states) / machine.memory_bandwidth
    small = 2 * hops * machine.latency_s
    if layout.stage == 3:
        forward_gather, backward_gather = (
            collective(buckets, size // layout.ranks * (layout.ranks - 1), machine.gather_bandwidth)
            for _, size, _, buckets in _directions(layout, settings.slots))
        units = sum(each.count for each in layout.gathers)
        forward = chain(forward_gather, forward_s, units, machine.overlap and settings.prefetch > 0)
        if machine.overlap and not settings.prefetch:  # only the reductions are beside the computation
            backward = backward_gather + chain(backward_s, reduce, reduced["calls"], True)
        else:
            backward = chain(backward_s, backward_gather + reduce, units, machine.overlap)
        return StepTime(forward_s + backward_s, reduce, forward_gather + backward_gather, update, forward, backward,
                        small + update)
    everyone = sent["all_gather"]
    gather = collective(everyone["calls"], everyone["bytes"], machine.gather_bandwidth)
    backward = chain(backward_s, reduce, reduced["calls"], machine.overlap)
    step = chain(update, gather, everyone["calls"], machine.overlap and layout.stage > 0)
    return StepTime(forward_s + backward_s, reduce, gather, update, forward_s, backward, small + step)


def _directions(layout, slots):
    """What the forward after a step gathers, and what its backward does, as gathered() counts."""
    forward = all_units(layout)
    both = gathered(layout, slots, 1)
    return forward, [one - part for one, part in zip(both, forward)]
