"""Stage 3, where parameters are sharded too: every model trains with the bits of stage 2.

What the models are is in stage3_models.py, what the ranks do with them in
rank_stage3.py.  A setting says how far ahead units are fetched, how many slots
their memory rotates through, and whether discarded memory is filled with NaN, so
that a unit that was not gathered when it was needed cannot go unseen.
"""

import re

import pytest
import rank_stage3
from ranks import rank_groups
from stage3_models import CASES, Leaks, Returns

ALL_SETTINGS = [{"prefetch": prefetch, "ring": ring, "fill": fill}
                for prefetch, ring in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)) for fill in (True, False)]
SETTINGS = [{"prefetch": 0, "ring": 1, "fill": True}, {"prefetch": 1, "ring": None, "fill": False},
            {"prefetch": 2, "ring": 3, "fill": True}]
TIGHT, USUAL = SETTINGS[:2]

# Cases that also run on one rank and on three in `make test`.
ON_OTHER_SIZES = ["GPT, tied", "checkpoint over several", "several places, reentrant", "outputs of all kinds", "nested",
                  "ResNet", "experts", "odd parameters"]

# name -> arguments of agree(): ways to train, and options; "GPT" if no case is named.
VARIATIONS = {
    **{how: {"how": how} for how in rank_stage3.WAYS if how not in ("plain", "overflow_on_one_rank")},
    "overflow_on_one_rank": {"how": "overflow_on_one_rank", "skip_nonfinite": True, "finite": False},
    "experts at their own pace": {"name": "experts", "how": "evaluate_alone"},
    "experts and a rank without a batch": {"name": "experts", "how": "one_rank_idle"},
    "accumulated ResNet": {"name": "ResNet", "how": "accumulate"},
    "accumulated experts": {"name": "experts", "how": "accumulate_without_sync"},
    "accumulated nested units": {"name": "nested, reentrant", "how": "accumulate_without_sync"},
    "two backwards through a checkpoint": {"name": "checkpoint around", "how": "backward_twice"},
    "two backwards through a reentrant checkpoint": {"name": "several places, reentrant", "how": "backward_twice"},
    "two graphs through checkpoints": {"name": "checkpoint over several", "how": "two_graphs"},
    "two graphs of nested units": {"name": "nested", "how": "sum_of_graphs"},
    "evaluated attention layers": {"name": "attention layers", "how": "evaluate_between"},
    "evaluated weight norms": {"name": "weight norms", "how": "evaluate_between"},
    "evaluated tied units": {"name": "GPT, tied units", "how": "evaluate_between"},
    "forward in the backward of a checkpoint": {"name": "checkpoint around", "how": "forward_in_backward"},
    "backward of a checkpoint in a thread": {"name": "checkpoint over several", "how": "other_thread"},
    "backward of a reentrant checkpoint in a thread": {"name": "checkpoint around, reentrant", "how": "other_thread"},
    "backward of solved units in a thread": {"name": "solved in backward", "how": "other_thread"},
    "backward of nested units in a thread": {"name": "nested", "how": "other_thread"},
    "failures under a checkpoint": {"name": "checkpoint around", "how": "backward_fails_first"},
    "failures under a reentrant checkpoint": {"name": "checkpoint around, reentrant", "how": "backward_fails_first"},
    "autocast over checkpoints": {"name": "checkpoint around", "how": "autocast"},
    "autocast over tied weights": {"name": "GPT, tied", "how": "autocast"},
    "bf16": {"dtype": "bfloat16"},
    "bf16, written": {"dtype": "bfloat16", "how": "written_between"},
    "bf16, loaded": {"dtype": "bfloat16", "how": "loaded_between"},
    "bf16, accumulated": {"dtype": "bfloat16", "how": "accumulate_without_sync"},
    "bf16, odd": {"name": "odd parameters", "dtype": "bfloat16"},
    "fp64": {"dtype": "float64"},
    "fp64, images": {"name": "ResNet", "dtype": "float64"},
    "fp16 with a loss scale": {"dtype": "float16", "loss_scale": 1024.0},
    "two dtypes, clipped": {"name": "GPT, two dtypes", "max_grad_norm": 0.5},
    "clipped": {"max_grad_norm": 0.5},
    "clipped, experts": {"name": "experts", "max_grad_norm": 0.5},
    "small buckets": {"name": "nested", "bucket_mb": 0.001},
    "tiny buckets": {"name": "odd parameters", "bucket_mb": 1e-6},
    "sums": {"reduce_op": "sum"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "lr": 0.05},
    "amsgrad": {"optimizer": "adam", "amsgrad": True},
    "groups": {"groups": "two"},
    "groups, shared weight": {"name": "shared weight", "groups": "two", "max_grad_norm": 0.5},
    "groups, parameters left out": {"groups": "matrices only"},
    "ten steps": {"name": "GPT, tied", "steps": 10},
    "ten steps of sixteen units": {"name": "sixteen units", "steps": 10},
}


@pytest.fixture(scope="module")
def groups():
    """Torch ranks, one group for each size."""
    yield from rank_groups()


def sizes(*small):
    return [*small, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3) if n not in small)]


# ---- the bits of stage 2 --------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_with_the_bits_of_stage_2(groups, name):
    groups(2).run(rank_stage3.agree, name, SETTINGS, deadline=60)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ON_OTHER_SIZES)
def test_other_numbers_of_ranks(groups, name, n):
    groups(n).run(rank_stage3.agree, name, SETTINGS[1:], deadline=60)


@pytest.mark.parametrize("variation", VARIATIONS)
def test_a_way_to_train_has_the_bits_of_stage_2(groups, variation):
    groups(2).run(rank_stage3.agree, settings=SETTINGS, deadline=60, **{"name": "GPT"} | VARIATIONS[variation])


@pytest.mark.parametrize("how", ["at_own_pace", "one_rank_idle", "evaluate_alone", "accumulate_without_sync"])
def test_three_ranks_that_differ(groups, how):
    groups(3).run(rank_stage3.agree, "GPT, tied", SETTINGS, how, deadline=60)


@pytest.mark.long
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_model_with_every_setting(groups, name, n):
    groups(n).run(rank_stage3.agree, name, ALL_SETTINGS, steps=4, deadline=300)


@pytest.mark.long
@pytest.mark.parametrize("variation", VARIATIONS)
def test_every_way_to_train_with_every_setting(groups, variation):
    groups(2).run(rank_stage3.agree, settings=ALL_SETTINGS, deadline=300, **{"name": "GPT"} | VARIATIONS[variation])


WAYS_FOR_EVERY_MODEL = ["accumulate", "accumulate_without_sync", "evaluate_between", "backward_twice", "two_graphs", "sum_of_graphs",
                        "inference_first", "other_thread", "saved_elsewhere", "gradients_for_the_caller", "evaluate_alone", "one_rank_idle"]


@pytest.mark.long
@pytest.mark.parametrize("how", WAYS_FOR_EVERY_MODEL)
@pytest.mark.parametrize("name", CASES)
def test_every_model_in_every_way(groups, name, how):
    if how == "gradients_for_the_caller" and "reentrant" in name:
        pytest.skip("torch refuses autograd.grad through reentrant checkpoints")
    if how == "saved_elsewhere" and name == "one unit without gradient":
        # save_on_cpu() keeps a result that a node saves of itself, as it is, where memory is the CPU's: node and result
        # hold each other until a backward lets go, and the first unit has none.  Plain torch leaks the graph as well.
        pytest.skip("torch never frees a graph without a backward that was built under save_on_cpu")
    # The settings in turn: every model and every way meet each of them.
    turn = list(CASES).index(name) + WAYS_FOR_EVERY_MODEL.index(how)
    groups(2).run(rank_stage3.agree, name, [SETTINGS[turn % len(SETTINGS)]], how, deadline=120)


@pytest.mark.parametrize("name, options", [
    ("GPT, tied", {}), ("GPT", {"dtype": "bfloat16"}), ("nested", {"optimizer": "sgd", "momentum": 0.9})])
def test_optimizer_state(groups, name, options):
    for setting in (TIGHT, USUAL):
        groups(2).run(rank_stage3.optimizer_state, name, setting, deadline=60, **options)


@pytest.mark.parametrize("n", sizes(2))
def test_two_models_on_one_communicator(groups, n):
    groups(n).run(rank_stage3.adversaries, SETTINGS, deadline=60)


# ---- outside the units ------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_parameters_are_placeholders_outside_their_unit(groups, setting):
    groups(2).run(rank_stage3.placeholders, setting, deadline=60)


@pytest.mark.parametrize("n", sizes(1, 2))
def test_gathered(groups, n):
    for setting in (TIGHT, USUAL):
        groups(n).run(rank_stage3.gathering, setting, deadline=60)


@pytest.mark.parametrize("n", sizes(1, 2))
def test_gathered_to_write(groups, n):
    for message in groups(n).run(rank_stage3.writing, USUAL, deadline=60):
        assert "write=True" in message


@pytest.mark.parametrize("n", sizes(1, 2))
def test_state_dict_of_the_module(groups, n):
    for messages in groups(n).run(rank_stage3.state_dicts, USUAL, deadline=60):
        assert all("gathered(" in message for message in messages), messages


def test_loading_outside_gathered(groups):
    groups(2).run(rank_stage3.loading_outside, USUAL, deadline=60)


@pytest.mark.parametrize("setting", [TIGHT, USUAL], ids=str)
@pytest.mark.parametrize("name", rank_stage3.RIGHT_OR_REFUSED)
def test_right_or_refused(groups, name, setting):
    first, *others = groups(2).run(rank_stage3.right_or_refused, name, setting, deadline=60)
    assert all(other.split(":")[0] == first.split(":")[0] for other in others)


# ---- errors -------------------------------------------------------------------------------

# What a message must say: where, and what to do.
UNIT = r"blocks\.\d|Gpt|root|the model"
TOLD = {
    "create_graph": [UNIT, "create_graph|higher.order"],
    "backward_with_create_graph": [UNIT, "create_graph|higher.order"],
    "step_between_forward_and_backward": [UNIT, r"step\(\)|changed", "backward"],
    "another_optimizer": [r"SGD\.step", r"blocks\.1", "ShardedOptimizer", "gathered"],
    "another_optimizer_before_backward": [r"Adam\.step", "embedding", "ShardedOptimizer", "gathered"],
    "step_inside_gathered": [r"step\(\)", r"gathered\(\)", "outside"],
    "write_between_forward_and_backward": [UNIT, "gathered|changed|written", "backward"],
    "replaced_unit": [r"blocks\.1", "replaced|another|not the", "new ShardedOptimizer|before"],
    "replaced_layer": [r"blocks\.1\.up", "replaced|another|not the", "new ShardedOptimizer|before"],
    "replaced_parameter": [r"blocks\.1\.up\.weight", "replaced|another|not the", "new ShardedOptimizer|copy"],
    "loaded_by_assignment": [r"blocks\.\d|embedding", "replaced|another|not the|gathered"],
    "half": [r"blocks\.\d|embedding", "dtype|float16|replaced|half"],
    "one_unit_in_another_dtype": [r"blocks\.1", "dtype|float64|replaced"],
    "replaced_memory": [r"blocks\.1\.up\.weight", "is written", "write=True"],
    "copied_model": ["cop(y|ied)", "new ShardedOptimizer|own|original"],
    "penalty_on_weights": [r"blocks\.1\.norm1", "is used", "weight_decay", "full_param", "units="],
    "weight_used_by_another_module": [r"blocks\.1\.up\.weight", "is used", r"unit 'blocks\.1'", "units="],
    "copied_parameter": [r"blocks\.1", "is copied", "gathered"],
    "saved_parameter": [r"blocks\.1", "is copied", "gathered"],
    "written_by_a_list_function": [r"blocks\.1\.up", "is written", "write=True"],
    "written_as_a_result": [r"blocks\.1\.up\.weight", "is written", "write=True"],
    "guard_overwritten_behind_its_class": [r"blocks\.1\.up\.weight", "was written", "write=True"],
    "guard_overwritten": [r"blocks\.1\.up\.weight", "written|overwritten", "gathered"],
    "guard_initialised": [r"blocks\.1\.up\.bias", "written|overwritten", "gathered"],
    "guard_of_the_root_overwritten": [r"head\.weight", "written|overwritten", "gathered"],
    "unfrozen_later": [r"embedding\.weight", "frozen", "new ShardedOptimizer"],
    "parameters_added": ["stage 3", "new ShardedOptimizer"],
}


def check_told(messages, patterns):
    for message in messages:
        for pattern in patterns:
            assert re.search(pattern, message), f"no {pattern!r} in: {message}"


def test_every_misuse_has_a_message():
    assert set(TOLD) == set(rank_stage3.MISUSES)


@pytest.mark.parametrize("n", sizes(1, 2))
@pytest.mark.parametrize("name", TOLD)
def test_misuse_is_told(groups, name, n):
    check_told(groups(n).run(rank_stage3.refused, name, USUAL, deadline=60), TOLD[name])


@pytest.mark.parametrize("setting", [TIGHT, USUAL], ids=str)
@pytest.mark.parametrize("name", rank_stage3.HARMLESS)
def test_training_goes_on_after_an_error(groups, name, setting):
    groups(2).run(rank_stage3.recovers, name, setting, deadline=60)


@pytest.mark.long
@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=str)
@pytest.mark.parametrize("name", TOLD)
def test_misuse_is_told_with_every_setting(groups, name, setting):
    check_told(groups(2).run(rank_stage3.refused, name, setting, deadline=60), TOLD[name])


@pytest.mark.parametrize("setting", [TIGHT, USUAL], ids=str)
@pytest.mark.parametrize("kind", Returns.KINDS)
def test_a_unit_that_returns_its_weight(groups, kind, setting):
    check_told(groups(2).run(rank_stage3.refused_model, kind, setting, deadline=60), [r"blocks\.\d", "clone|copy"])


@pytest.mark.parametrize("setting", [TIGHT, USUAL], ids=str)
@pytest.mark.parametrize("kind", Leaks.KINDS)
def test_a_unit_whose_weights_are_needed_behind_its_output(groups, kind, setting):
    check_told(groups(2).run(rank_stage3.refused_model, kind, setting, deadline=60), [r"blocks\.\d"])


@pytest.mark.parametrize("n", sizes(1, 2))
@pytest.mark.parametrize("name, patterns", {
    "units: a name": ["units", "module"],
    "units: a number": ["units", "list|iterable"],
    "units: a parameter": ["units", "Parameter"],
    "units: a foreign module": ["units", "Block", "not (a )?(part|in|module|submodule)"],
    "units: a class of no module": ["units", "Conv2d"],
    "init: nothing is on the meta device": ["init=", "meta"],
    "prefetch: negative": ["prefetch", "-1"],
    "prefetch: a fraction": ["prefetch", r"1\.5"],
    "prefetch: a bool": ["prefetch", "True"],
    "no module": ["stage", "module"],
    "no module, groups": ["stage", "module"],
    "stage": ["stage", "4"],
    "units at stage 2": ["units", "stage 3"],
    "prefetch at stage 2": ["prefetch", "stage 3"],
    "shared parameters": ["shared_params"],
    "a parameter of another module": ["parameter", "module"],
}.items())
def test_bad_arguments(groups, name, patterns, n):
    check_told(groups(n).run(rank_stage3.bad_construction, name, deadline=60), patterns)


def test_units_that_differ_between_ranks(groups):
    check_told(groups(2).run(rank_stage3.bad_construction, "units differ", deadline=60), ["Mismatch", "units?"])


def test_autocast_over_fp32_is_warned_about(groups):
    for messages in groups(2).run(rank_stage3.autocast_warnings, deadline=60):
        assert len(messages) == 1 and "16-bit copy" in messages[0] and "bfloat16" in messages[0], messages


def test_weights_of_other_dtypes_stay_whole(groups):
    check_told(groups(2).run(rank_stage3.weights_of_other_dtypes, deadline=60), [r"0\.(weight|bias)", "gathered"])


def test_a_unit_that_is_never_called(groups):
    check_told(groups(2).run(rank_stage3.bypassed_unit, deadline=60), ["out_proj", "is used", "units="])
    check_told(groups(2).run(rank_stage3.bypassed_unseen, deadline=60), [r"layer\.weight", "never called", "units="])


def test_a_second_optimizer_is_refused(groups):
    check_told(groups(2).run(rank_stage3.second_optimizer, USUAL, deadline=60), ["ShardedOptimizer"])


def test_memory_that_cannot_be_shared_is_told_once(groups):
    """On the CPU it always can be; the other rank says nothing."""
    told, *others = groups(2).run(rank_stage3.warnings_of_own_memory, USUAL, deadline=60)
    assert others == [[]]
    assert len(told) == 1 and re.match("GPU 0.*no virtual memory management.*stage 2", told[0])


@pytest.mark.parametrize("setting", [TIGHT, USUAL], ids=str)
@pytest.mark.parametrize("end", rank_stage3.ENDS)
def test_memory_returns_when_all_is_dropped(groups, end, setting):
    """Triggers of a graph that is never run, or is kept by the model, must not keep everything alive."""
    assert groups(1).run(rank_stage3.memory_returns, end, setting, deadline=60) == [0]


# ---- controls: these comparisons can fail ---------------------------------------------------


def test_one_bit_is_seen(groups):
    for lines in groups(2).run(rank_stage3.one_bit, USUAL, deadline=60):
        assert any(re.match(r"step 0: weight blocks\.1\.up\.bias: \d+ of 32 elements differ, by at most", line)
                   for line in lines), lines


@pytest.mark.parametrize("name", ["GPT", "several places", "LSTM and GRU", "ResNet"])
def test_a_missed_gather_is_seen(groups, name):
    """Units are told of their backward by hooks on their outputs: without these nothing is right any more."""
    for taken, result in groups(2).run(rank_stage3.without_triggers, name, TIGHT, deadline=60):
        assert taken > 0, "the outputs have no hooks: this control must take away something else"
        assert result.startswith(("raised", "differs")), result
