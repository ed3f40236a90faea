"""Stage 3: models that are built on the meta device, and weights that come from files."""

import re

import pytest
import rank_stage3_meta
from ranks import rank_groups


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups()


@pytest.mark.parametrize("units", ["blocks", "nested", "none"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_seed_gives_the_model_of_the_cpu(groups, n, units):
    groups(n).run(rank_stage3_meta.seeded, "float32", units, deadline=60)


def test_16_bit(groups):
    groups(2).run(rank_stage3_meta.seeded, "bfloat16", "blocks", deadline=60)


def test_rank_0s_values_count(groups):
    groups(2).run(rank_stage3_meta.only_rank_0_counts, deadline=60)


def test_groups_of_meta_parameters(groups):
    groups(2).run(rank_stage3_meta.groups_of_meta_parameters, deadline=60)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_from_files(groups, tmp_path, device, parts):
    groups(2).run(rank_stage3_meta.from_files, str(tmp_path), device, parts, deadline=60)


def test_what_files_lack_is_initialised(groups, tmp_path):
    groups(2).run(rank_stage3_meta.files_and_initialisation, str(tmp_path), deadline=60)


def test_own_function(groups):
    groups(2).run(rank_stage3_meta.own_function, deadline=60)


@pytest.mark.parametrize("what, patterns", {
    "no way": ["'weight'", "Own", "init=", "weights="],
    "left out": ["layer.weight", "init="],
    "buffer": ["table", "init="],
    "no file": ["weights=, rank 0: FileNotFoundError", "no file.safetensors"],
    "no safetensors file": ["weights=, rank 0: ", "SafetensorError"],
    "shape": [r"layer.weight", r"\(3, 4\)", r"\(3, 3\)"],
    "prefix": ["'module[a-z.]*' of the files is not in the model", "begin with: module.*; those of the model with: weight, layer.weight",
               "without a prefix such as 'module.'"],
    "one name more": ["'extra'.*not in the model"],
    "empty": ["no tensor", "begin with: none"],
    "whole numbers": ["'layer.weight' is I64.*float32"],
    "two files": ["'[a-z.]*' is in two of the files"],
    "bad data": ["weights=, 'layer.weight', rank 0: OSError: a bad block"],
    "bad data of a buffer": ["weights=, 'table', rank 0: OSError: a bad block"],
    "stage 2": ["meta", "cpu"],
    "raises": ["from the caller's function"],
}.items(), ids=str)
def test_refusals(groups, tmp_path, what, patterns):
    messages = groups(2).run(rank_stage3_meta.refused, str(tmp_path), what, deadline=60)
    assert what == "stage 2" or messages[0] == messages[1]
    for message in messages:
        assert all(re.search(pattern, message) for pattern in patterns), message


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what, error", {
    "raises": "KeyError: .*from the caller's function",
    "parameter": "ValueError: parameter '[a-z.]+' has no values after initialisation: init= left it out",
    "buffer": "ValueError: buffer 'table' was on the meta device and has no values",
}.items())
def test_initialisation_that_fails_on_one_rank(groups, what, error, victim):
    messages = groups(2).run(rank_stage3_meta.fails_on_one, what, victim, deadline=60)
    assert re.match(error, messages[victim]), messages
    other = messages[1 - victim]
    assert re.match("Mismatch: initialisation of .*ranks disagree", other), messages
    assert re.search(f"Rank {victim} has: an error: {error}", other), messages
    assert re.search(f"Rank {1 - victim} has: no error", other), messages


def test_one_unit_at_a_time_has_memory(groups):
    for most, unit in groups(2).run(rank_stage3_meta.peak, 6, 64, deadline=60):
        assert unit <= most <= unit + 6 * 2 * 64  # the guards of all parameters are one element each
