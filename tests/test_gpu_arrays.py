"""Sharded training of arrays on (emulated) GPUs: the bits of reference.py, without a finding, on many schedules.

What scenarios.py says is run as in test_equivalence.py; here arrays are on a GPU
of the emulated CUDA, ranks are processes, and between them is the emulated NCCL.
"""

import cuda_build
import numpy
import pytest
import rank_numbers
import zero_c
from ranks import RankGroup
from scenarios import DTYPES, OPTIMIZERS, difference, digest, plain_steps, reference_run, scenario
from test_equivalence import STEPS
from test_hosts import on_hosts
from zero_c import _gpu

pytestmark = cuda_build.needs_headers

SCHEDULES = [(seed, eager) for seed in range(1, 4) for eager in (0, 3, -1)]


@pytest.fixture(scope="module")
def groups():
    started = {}
    cuda_build.build_plugin()  # once, before the ranks ask for it

    def get(n):
        if n not in started:
            started[n] = RankGroup(n, leaks=False)  # the plugin and its watchdogs stay until the process ends
        return started[n]

    yield get
    for group in started.values():
        group.close()


def check(group, runs, deadline=300, digests=rank_numbers.digests):
    expected = [reference_run(run, group.n) for run in runs]
    of_ranks = group.run(digests, runs, SCHEDULES, deadline=deadline)
    for position, (run, result) in enumerate(zip(runs, expected, strict=True)):
        if all(of_rank[position] == digest(result) for of_rank in of_ranks):
            continue
        schedule = SCHEDULES[position % len(SCHEDULES)]
        found = [difference(again, result) for again in group.run(rank_numbers.play, run, schedule, deadline=deadline)]
        pytest.fail(f"{schedule} on {group.n} ranks; a second run gives {[text or 'right' for text in found]}\n"
                    f"scenario: {run}", pytrace=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_the_bits_are_those_of_the_cpu(groups, n, optimizer):
    check(groups(n), [scenario(seed=n, optimizer=optimizer, dtypes=DTYPES, steps=STEPS, stage=stage, bucket_mb=bucket_mb)
                      for stage in (0, 1, 2) for bucket_mb in (0.001, 1.0)])


def test_stages_below_3_need_no_virtual_memory(groups):
    check(groups(2), [scenario(seed=30 + stage, dtypes=DTYPES, steps=plain_steps(2), stage=stage) for stage in (0, 1, 2)],
          digests=rank_numbers.without_virtual_memory)


@pytest.mark.parametrize("n", [1, 2])
def test_nonfinite_gradients_skip_everywhere(groups, n):
    steps = [{"rounds": [{}], "loss_scale": 8.0, "max_norm": 0.75},
             {"rounds": [{}, {"bad": [[n - 1, 4, "nan"]]}], "loss_scale": 8.0, "max_norm": 0.75},
             {"rounds": [{}], "loss_scale": 4.0}]
    check(groups(n), [scenario(seed=40, dtypes=DTYPES, steps=steps, stage=stage, skip_nonfinite=True)
                      for stage in (0, 1, 2)])


@pytest.mark.parametrize("share", [True, False], ids=["units share memory", "units have memory of their own"])
@pytest.mark.parametrize("n", [1, 2])
def test_sharded_parameters(groups, n, share):
    run = scenario(seed=50 + n, optimizer="amsgrad", steps=plain_steps(3), dtypes=["float32", "float64"])
    expected = reference_run(run, n)["params"]
    for schedule in SCHEDULES[:3]:
        for found in groups(n).run(rank_numbers.sharded_parameters, run, schedule, share, deadline=60):
            for array, right in zip(found, expected, strict=True):
                assert array.tobytes() == right.tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replays_of_a_graph_are_steps(groups, optimizer):
    steps = [{"rounds": [{}], "max_norm": 0.75} for _ in range(6)]
    steps[4]["options"] = {0: {"lr": 0.003}}
    for stage, schedule in zip((0, 1, 2), SCHEDULES[:3]):
        run = scenario(seed=60 + stage, optimizer=optimizer, dtypes=DTYPES, steps=steps, stage=stage)
        [eager] = groups(1).run(rank_numbers.replayed, run, schedule, False, deadline=60)
        [replayed] = groups(1).run(rank_numbers.replayed, run, schedule, True, deadline=60)
        assert replayed == eager
        assert [told[3] for told in eager[1]] == [2, 4, 6] and all(told[0] > 0 for told in eager[1])


def test_several_ranks_are_not_captured(groups):
    run = scenario(seed=70, dtypes=DTYPES, steps=[{"rounds": [{}], "max_norm": 0.75} for _ in range(3)], stage=2)
    for said in groups(2).run(rank_numbers.refused_capture, run, SCHEDULES[1], deadline=60):
        assert "training on 2 ranks cannot be captured" in said


def test_two_hosts_have_the_bits_of_one(groups):
    """Three ranks, connected by TCP as between hosts; the order of sums has to be asked for there."""
    with RankGroup(3, env=on_hosts("aab"), leaks=False) as group:
        check(group, [scenario(seed=2, dtypes=DTYPES, steps=STEPS, stage=stage, deterministic=True) for stage in (0, 1, 2)])


# ---- what is missing is said -----------------------------------------------------


class Elsewhere:
    """An array that claims to be on a GPU."""

    def __init__(self, device=0):
        self.device = device

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, **_):
        raise AssertionError("nobody should ask before it is clear that there is a GPU")


@pytest.fixture
def alone():
    with zero_c.init(0, 1, job="gpu arrays") as comm:
        yield comm


def test_a_build_without_the_cuda_part(alone, monkeypatch, tmp_path):
    monkeypatch.setattr(_gpu, "PLUGIN", tmp_path / "_cuda.so")
    with pytest.raises(zero_c.Error, match="nvcc.*ZERO_C_CUDA=1"):
        _gpu.communicator(alone, 0)


def test_arrays_in_several_places(alone):
    for arrays, said in (([Elsewhere(0), Elsewhere(1)], r"arrays\[0\] is on GPU 0 and arrays\[1\] on GPU 1"),
                         ([Elsewhere(0), numpy.zeros(1)], "GPU 0.*the CPU"), ([numpy.zeros(1), Elsewhere(2)], "GPU 2")):
        with pytest.raises(ValueError, match=said):
            zero_c.ShardedOptimizer(arrays, "sgd", lr=1.0, comm=alone)


def test_shared_parameters_are_of_cpus(alone):
    with pytest.raises(ValueError, match="shared_params"):
        zero_c.ShardedOptimizer([Elsewhere()], "sgd", lr=1.0, comm=alone, shared_params=True)


# ---- the order of sums is the caller's to leave open -------------------------------


@pytest.mark.parametrize("asked", [None, True, False])
def test_what_was_done_is_told(groups, asked):
    for told in groups(2).run(rank_numbers.sums_in_rank_order, asked, deadline=60):
        assert told == [asked is not False] * 2
