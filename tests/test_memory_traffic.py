"""What the engine holds and what it sends, exactly: the table of stages on padded sizes, plus named buffers.

    bytes per padded element, N ranks, p bytes a parameter, s bytes a sum (4; 8 for float64), m a master's
    (bfloat16 2, float16 4), a states of s bytes each (Adam 2, with amsgrad 3, momentum 1, plain SGD 0):

    stage   parameters   gradients          master   optimizer state
    0       p            s                  m        a s
    1       p            p (+ s/N after a   m/N      a s/N
                         second backward)
    2       p            s/N                m/N      a s/N

    payload of a step after k synchronised backwards: (k+1) times the padded elements, at every stage
"""

import numpy
import pytest
import rank_numbers
from ranks import rank_groups
from scenarios import OPTIMIZERS, SHAPES

PARAM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
MASTER_BYTES = {"float32": 0, "float64": 0, "bfloat16": 2, "float16": 4}
STATES = {"adamw": 2, "adam": 2, "amsgrad": 3, "sgd": 0, "momentum": 1, "nesterov": 1}
# Control records, spans, segments and scalars: what is not sized by the model.
SMALL_BYTES = 64 << 10
SMALL_BYTES_PER_PARAMETER = 1024
RING_SLOTS = 16


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups()


def sum_bytes(dtype):
    return 8 if dtype == "float64" else 4


def space(shapes, dtype, ranks, bucket_mb):
    """(padded elements, elements of a bucket, buckets) of one dtype's flat space."""
    unit = 64 * ranks
    used = sum(-(-int(numpy.prod(shape, dtype=int)) // 64) * 64 for shape in shapes)
    padded = -(-used // unit) * unit
    bucket = max(min(int(bucket_mb * 2**20) // PARAM_BYTES[dtype] // unit * unit, padded), unit)
    return padded, bucket, -(-padded // bucket)


def table(stage, dtype, padded, ranks, states, rounds, shared=False):
    p, s, m = PARAM_BYTES[dtype], sum_bytes(dtype), MASTER_BYTES[dtype]
    share = 1 if stage == 0 else ranks
    gradients = {0: padded * s, 1: padded * p, 2: padded * s // ranks}[stage]
    if stage == 1 and rounds > 1:
        gradients += padded * s // ranks
    return {"parameters": padded * p // (ranks if shared else 1), "gradients": gradients,
            "master": padded * m // share, "optimizer_state": padded * states * s // share}


@pytest.mark.parametrize("dtype", PARAM_BYTES)
@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("n", (1, 2, 3))
def test_memory_is_the_table(groups, n, stage, dtype):
    for optimizer in OPTIMIZERS:
        for bucket_mb in (1e-6, 0.002, 1.0):
            for shared in (False, True):
                rows = groups(n).run(rank_numbers.memory_and_traffic, stage, optimizer, dtype, SHAPES, bucket_mb,
                                     shared, [1, 2], deadline=60)
                padded, bucket, _ = space(SHAPES, dtype, n, bucket_mb)
                for rank, row in enumerate(rows):
                    for rounds, memory in ((1, row["memory"][0]), (2, row["memory"][1])):
                        wanted = table(stage, dtype, padded, n, STATES[optimizer], rounds, shared)
                        found = {name: memory[name] for name in wanted}
                        assert found == wanted, (rank, optimizer, bucket_mb, shared, rounds)
                        ring = 0 if stage == 1 else min(RING_SLOTS * bucket, padded) * PARAM_BYTES[dtype]
                        # stage 1 reduces 16-bit buckets through a short ring of shards
                        ring += bucket * sum_bytes(dtype) // n * 4
                        small = SMALL_BYTES + SMALL_BYTES_PER_PARAMETER * len(SHAPES)
                        assert 0 <= memory["buffers"] <= ring + small, (rank, optimizer, bucket_mb, memory["buffers"])
                        assert memory["total"] == sum(memory[name] for name in (*wanted, "buffers"))


@pytest.mark.parametrize("dtype", PARAM_BYTES)
@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("n", (1, 2, 3))
def test_traffic_is_the_table(groups, n, stage, dtype):
    for bucket_mb in (1e-6, 0.002, 1.0):
        rows = groups(n).run(rank_numbers.memory_and_traffic, stage, "adamw", dtype, SHAPES, bucket_mb, False,
                             [1, 2, 3], deadline=60)
        padded, _, buckets = space(SHAPES, dtype, n, bucket_mb)
        gathered = sum_bytes(dtype) if stage == 0 else PARAM_BYTES[dtype]  # stage 0 gathers the reduced gradient
        for row in rows:
            start = row["start"]
            assert start["reduce_scatter"]["payload"] == start["all_gather"]["payload"] == 0
            assert start["broadcast"]["payload"] == padded  # rank 0's values
            for rounds, traffic in zip((1, 2, 3), row["traffic"], strict=True):
                reduced = {"calls": rounds * buckets, "payload": rounds * padded,
                           "bytes": rounds * padded * PARAM_BYTES[dtype] * (n - 1) // n}
                everyone = {"calls": buckets, "payload": padded, "bytes": padded * gathered * (n - 1) // n}
                assert traffic["reduce_scatter"] == reduced
                assert traffic["all_gather"] == everyone
                assert traffic["broadcast"]["calls"] == traffic["broadcast"]["bytes"] == 0
                assert traffic["bytes"] == reduced["bytes"] + everyone["bytes"]  # the small reduction is not in it
                assert traffic["small"]["calls"] >= 1


def test_deferred_rounds_send_nothing(groups):
    """k backwards of which one is synchronised: 2 Psi, at every stage."""
    for stage in (0, 1, 2):
        for row in groups(2).run(rank_numbers.memory_and_traffic, stage, "adamw", "float32", SHAPES, 0.002, False,
                                 [1], micro=3, deadline=60):
            padded, _, _ = space(SHAPES, "float32", 2, 0.002)
            traffic = row["traffic"][0]
            assert traffic["reduce_scatter"]["payload"] + traffic["all_gather"]["payload"] == 2 * padded


def test_the_papers_table_for_16_bit(groups):
    """Large N = 2 model: bytes per parameter of each stage, as the paper counts them, padding negligible."""
    shapes = [[1 << 18]]
    paper = {("bfloat16", 0): 16, ("bfloat16", 1): 4 + 10 / 2, ("bfloat16", 2): 2 + 14 / 2,
             ("float16", 0): 18, ("float16", 1): 4 + 12 / 2, ("float16", 2): 2 + 16 / 2,
             ("float32", 0): 16, ("float32", 1): 8 + 8 / 2, ("float32", 2): 4 + 12 / 2}
    for (dtype, stage), each in paper.items():
        for row in groups(2).run(rank_numbers.memory_and_traffic, stage, "adamw", dtype, shapes, 0.0625, False, [1],
                                 deadline=60):
            memory = row["memory"][0]
            assert (memory["total"] - memory["buffers"]) / (1 << 18) == each, (dtype, stage)
            assert memory["buffers"] <= RING_SLOTS * (64 << 10) + 4 * (64 << 10) + SMALL_BYTES
