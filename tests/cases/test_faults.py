"""Rows whose ranks fail, are late or disagree: each test has its own processes (faults.py)."""

import secrets

import pytest
import rank_checkpoint
from ranks import RankGroup, run_ranks

from cases import faults


def is_a(error, name):
    assert name in error["kinds"], f"{error['kinds'][:1]}: {error['text']}"


@pytest.mark.row(75)
def test_uneven_batches_end_in_an_error():
    error, _ = run_ranks(2, faults.uneven_batches, 2.0, deadline=30)
    is_a(error, "CommError")
    assert "rank 1" in error["text"] or "missing: 1" in error["text"], error["text"]
    assert error["seconds"] < 5


@pytest.mark.row(126)
def test_a_save_that_was_killed_leaves_the_old_checkpoint(tmp_path):
    (before, _), _ = run_ranks(2, rank_checkpoint.saved, str(tmp_path))
    with RankGroup(2) as group:  # rank 0 dies within a write, long before the manifest
        assert group.run(rank_checkpoint.save_with_trouble, str(tmp_path), 0, 8, True, check=False)[0].exit_code == -9
    assert run_ranks(1, rank_checkpoint.digest_of, str(tmp_path)) == [rank_checkpoint.digest(before)]


@pytest.mark.row(131)
def test_a_save_on_one_rank_ends_in_an_error(tmp_path):
    text, _ = run_ranks(2, rank_checkpoint.alone, str(tmp_path), "nothing", deadline=40)
    assert text.startswith(("Timeout", "PeerLost")) and "save" in text and "1" in text, text


@pytest.mark.row(145)
def test_a_save_against_a_step_is_told(tmp_path):
    for text in run_ranks(2, rank_checkpoint.alone, str(tmp_path), "step", deadline=40):
        assert text.startswith("Mismatch") and "save" in text and "step" in text, text


@pytest.mark.row(138)
def test_a_broken_group_stays_broken():
    for errors in run_ranks(2, faults.go_on_after_an_error, deadline=40):
        for error in errors:
            is_a(error, "Error")
        # later calls fail at once, not after the timeout
        assert all(error["seconds"] < 2 for error in errors[1:]), errors


@pytest.mark.row(139)
def test_a_timeout_names_the_absent_rank():
    outcomes = run_ranks(4, faults.one_sleeps, 2.0, deadline=40)
    for error in (outcomes[0], outcomes[1], outcomes[3]):
        is_a(error, "CommError")
        text = error["text"]
        assert "rank 2" in text or "missing: 2" in text, text
        assert "all_reduce" in text or "all-reduce" in text, text


@pytest.mark.row(141)
@pytest.mark.parametrize("kind", ["shape", "name", "dtype", "count"])
def test_other_models_are_found_at_construction(kind):
    for error in run_ranks(3, faults.other_model, kind, deadline=40):
        is_a(error, "Mismatch")
        assert {"shape": "weight", "name": "kernel", "dtype": "float64", "count": "2"}[kind] in error["text"]


@pytest.mark.row(143)
def test_swapped_groups_are_found_at_construction():
    for error in run_ranks(2, faults.swapped_groups, deadline=40):
        is_a(error, "Mismatch")


@pytest.mark.row(156)
def test_closing_does_not_wait():
    waiting, closing = run_ranks(2, faults.close_while_a_peer_waits, deadline=40)
    assert closing["seconds"] < 1
    is_a(waiting, "PeerLost")
    assert waiting["seconds"] < 5 and "1" in waiting["text"]


@pytest.mark.row(157)
def test_a_process_joins_and_leaves_groups():
    for rank, outcome in enumerate(run_ranks(3, faults.three_lives, 6, secrets.token_hex(4), deadline=60)):
        assert outcome["sums"] == [3.0, 2.0 if rank < 2 else None] * 3
        assert outcome["held"][1] == outcome["held"][-1], "descriptors or threads have grown"


@pytest.mark.row(162)
def test_a_rank_that_never_starts_is_named():
    for error in run_ranks(3, faults.one_never_starts, 4, secrets.token_hex(4), deadline=30):
        is_a(error, "CommError")
        assert "3" in error["text"], error["text"]
        assert 2 < error["seconds"] < 12
