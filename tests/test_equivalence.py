"""Sharded training of plain arrays against reference.py: equal in every bit, however the engine is run.

The same scenario (scenarios.py) runs on all ranks and in the reference; parameters,
masters, moments, step counts, gradients read in between, norms and skipped steps
are compared.  What may not change the bits is varied: stage, bucket size, shared
parameters, instruction set, threads, number of processes.
"""

import itertools
import os

import pytest
import rank_numbers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import RankGroup
from scenarios import DTYPES, OPTIMIZERS, difference, digest, plain_steps, reference_run, scenario

STAGES = (0, 1, 2)
# In MiB: one smallest window for each rank, windows that cut parameters at odd places, one window for all.
BUCKETS_MB = (1e-6, 0.001, 0.003, 1.0)
SIZES = (1, 2, 3, 4, 7)
ISAS = ("base", "avx2", "avx512")

EXAMPLES = {"small": 10, "default": 40, "ci": 150, "long": 2000}
PROFILE = os.environ.get("ZERO_C_TEST_PROFILE", "default")
ANY_SCENARIO = settings(max_examples=EXAMPLES[PROFILE], deadline=None, derandomize=PROFILE != "long", database=None,
                        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], print_blob=True)


@pytest.fixture(scope="module")
def groups():
    """Ranks without torch, one group for each size and environment."""
    started = {}

    def get(n, **env):
        key = (n, *sorted(env.items()))
        if key not in started:
            started[key] = RankGroup(n, env=env)
        return started[key]

    yield get
    for group in started.values():
        group.close()


# What may not change any bit of the result.
HOW = ("stage", "bucket_mb", "shared_params")


def check(group, runs, deadline=120):
    """Runs scenarios on a group; every rank must end with the reference's bits."""
    expected, known = [], {}
    for run in runs:
        key = repr({name: value for name, value in run.items() if name not in HOW})
        if key not in known:
            result = reference_run(run, group.n)
            known[key] = (result, digest(result))
        expected.append(known[key])
    of_ranks = group.run(rank_numbers.digests, runs, deadline=deadline)
    for position, (run, (result, right)) in enumerate(zip(runs, expected, strict=True)):
        if all(of_rank[position] == right for of_rank in of_ranks):
            continue
        found = [difference(again, result) for again in group.run(rank_numbers.play, run, deadline=deadline)]
        how = {name: run[name] for name in HOW if name in run}
        wrong = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[position] != right]
        pytest.fail(f"{how} on {group.n} ranks, wrong on {wrong}; a second run gives: "
                    f"{[text or 'right' for text in found]}\nscenario: {run}", pytrace=False)


def ways(**scenario_options):
    """One scenario in every way the engine can run it."""
    return [scenario(stage=stage, bucket_mb=bucket_mb, shared_params=shared, **scenario_options)
            for stage in STAGES for bucket_mb in BUCKETS_MB for shared in (False, True)]


STEPS = [
    {"rounds": [{}], "look": True},
    {"rounds": [{}], "max_norm": 0.75},
    {"rounds": [{"unused": {"0": [0, 5]}}, {"micro": 3}], "look": True},
    {"rounds": [{"unused": {"0": [3], "1": [3], "2": [3], "3": [3], "4": [3], "5": [3], "6": [3]}}, {}, {}],
     "max_norm": 2.0},
    {"rounds": [{}], "clip": 1.5, "options": {"1": {"lr": 0.25}}},
]


def sizes_and_scenarios():
    """Seven ranks, which two cores run slowly, have one scenario."""
    for n, optimizer, dtypes in itertools.product(SIZES, OPTIMIZERS, (["float32"], ["bfloat16"], DTYPES)):
        if n < 7 or (optimizer, dtypes) == ("adamw", DTYPES):
            yield pytest.param(n, optimizer, dtypes, id=f"{n}-{optimizer}-{'+'.join(dtypes)}")


@pytest.mark.parametrize(("n", "optimizer", "dtypes"), list(sizes_and_scenarios()))
def test_every_way_gives_the_bits_of_the_reference(groups, n, optimizer, dtypes):
    check(groups(n), ways(seed=n, optimizer=optimizer, dtypes=dtypes, steps=STEPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (1, 2, 3))
def test_each_dtype_alone(groups, n, dtype):
    check(groups(n), ways(seed=10 + n, optimizer="adamw", dtypes=[dtype], steps=STEPS[:3]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", (1, 2, 3))
def test_every_instruction_set_gives_the_same_bits(groups, n, isa):
    group = groups(n, ZERO_C_ISA=isa)
    if not all(group.run(rank_numbers.machine_has, isa, deadline=60)):
        pytest.skip(f"not run: this machine lacks {isa}")
    for optimizer in OPTIMIZERS:
        check(group, [run for run in ways(seed=20, optimizer=optimizer, dtypes=DTYPES, steps=STEPS)
                      if run["bucket_mb"] == 0.003])


def test_an_unknown_instruction_set_is_an_error(groups):
    with RankGroup(1, env={"ZERO_C_ISA": "avx9"}) as group:
        outcome, = group.run(rank_numbers.digests, [scenario()], check=False, deadline=60)
    assert outcome.error and "ZERO_C_ISA" in outcome.error


@pytest.mark.parametrize("n", (1, 2))
def test_any_number_of_cores_gives_the_same_bits(groups, n):
    big = {"shapes": [[5], [70001], [129], [40000]], "seed": 30, "dtypes": ["float32", "bfloat16"], "steps": STEPS[:2]}
    for cores in (1, len(os.sched_getaffinity(0))):
        group = groups(n, ZERO_C_TEST_CORES=str(cores))
        check(group, [scenario(stage=stage, bucket_mb=bucket_mb, **big) for stage in STAGES
                      for bucket_mb in (0.01, 1.0)])


@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_nonfinite_gradients_skip_everywhere_or_propagate(groups, n, skip, bad):
    steps = [{"rounds": [{}], "loss_scale": 8.0, "max_norm": 0.75},
             {"rounds": [{}, {"bad": [[n - 1, 4, bad]]}], "loss_scale": 8.0, "max_norm": 0.75},
             {"rounds": [{}], "loss_scale": 4.0}]
    for dtypes in (["float32"], DTYPES):
        for optimizer in ("adamw", "momentum"):
            check(groups(n), ways(seed=40, optimizer=optimizer, dtypes=dtypes, steps=steps, skip_nonfinite=skip))


def test_sum_instead_of_mean(groups):
    check(groups(3), ways(seed=50, dtypes=DTYPES, steps=STEPS[:2], reduce_op="sum"))


def test_many_steps(groups):
    check(groups(2), [scenario(seed=60, optimizer=name, dtypes=DTYPES, steps=plain_steps(60, max_norm=1.0),
                               stage=stage, bucket_mb=0.001) for name in OPTIMIZERS for stage in STAGES])


@pytest.mark.long
def test_large_and_many_parameters(groups):
    shapes = [[8100], [32001, 17]] + [[100]] * 100 + [[1], [0], []]
    check(groups(4), [scenario(seed=70, optimizer=name, shapes=shapes, dtypes=dtypes, steps=STEPS[:3], stage=stage,
                               bucket_mb=0.1, shared_params=shared)
                      for name in ("adamw", "nesterov") for dtypes in (["float32"], DTYPES) for stage in STAGES
                      for shared in (False, True)], deadline=600)


def test_a_rank_without_gradients_takes_part_in_its_rounds(groups):
    """end_backward() on a rank that gave nothing: its next gradients belong to the next round, as on its peers."""
    for silent in (0, 1):
        steps = [{"rounds": [{"unused": {str(silent): [0, 1, 2]}}, {}, {}]}]
        check(groups(2), ways(seed=80, shapes=[[70], [], [300]], steps=steps))


# ---- any scenario at all ---------------------------------------------------


@st.composite
def _rounds(draw, n, count):
    unused = {str(rank): draw(st.lists(st.integers(0, count - 1), max_size=count, unique=True))
              for rank in draw(st.lists(st.integers(0, n - 1), max_size=n, unique=True))}
    bad = draw(st.one_of(st.just([]), st.just([]), st.just([]),
                         st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, count - 1),
                                            st.sampled_from(["inf", "-inf", "nan"])).map(list), max_size=2)))
    return {"micro": draw(st.sampled_from([1, 1, 1, 2, 3])), "unused": unused, "bad": bad}


@st.composite
def _scenarios(draw, n):
    shapes = draw(st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 63, 64, 65, 130]), max_size=2), min_size=1,
                           max_size=8))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        rounds = draw(st.lists(_rounds(n, len(shapes)), min_size=0, max_size=3))
        for this in rounds[:-1]:  # a rank that gives nothing is a case of its own, below
            for rank, unused in this["unused"].items():
                this["unused"][rank] = unused[:len(shapes) - 1]
        step = {"rounds": rounds,
                "loss_scale": draw(st.sampled_from([1.0, 1.0, 4.0, 3.0])), "look": draw(st.booleans())}
        if draw(st.booleans()):
            step["max_norm"] = draw(st.sampled_from([0.1, 1.0, 1e9]))
        elif draw(st.booleans()):
            step["clip"] = draw(st.sampled_from([0.1, 1.0, 1e9]))
        if draw(st.booleans()):
            step["options"] = {"0": {"lr": draw(st.sampled_from([0.0, 0.5, 1e-4]))}}
        if not step["rounds"]:
            step["look"] = False
            step.pop("clip", None)
        steps.append(step)
    return scenario(
        seed=draw(st.integers(0, 2**31)), optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))), shapes=shapes,
        dtypes=draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4)), steps=steps,
        stage=draw(st.sampled_from(STAGES)), bucket_mb=draw(st.sampled_from(BUCKETS_MB)),
        shared_params=draw(st.booleans()), reduce_op=draw(st.sampled_from(["mean", "mean", "sum"])),
        skip_nonfinite=draw(st.booleans()))


@pytest.mark.parametrize("n", (1, 2, 3, 4))
def test_any_scenario(groups, n):
    @ANY_SCENARIO
    @given(_scenarios(n))
    def holds(run):
        check(groups(n), [run], deadline=60)

    holds()
