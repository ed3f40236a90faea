"""Checkpoints without torch: what comes back, what is refused, and what is left of a save that was cut short.

rank_checkpoint.py has what the ranks do; test_checkpoint_torch.py is about models.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import pytest
import rank_checkpoint
from ranks import RankGroup, python_path, rank_groups

import zero_c
from zero_c import _blocks
from zero_c._core import checksum

RULES = {"adamw": {}, "amsgrad": {"rule": "adam", "amsgrad": True}, "momentum": {"rule": "sgd"},
         "plain sgd": {"rule": "sgd", "momentum": 0.0, "dampening": 0.0}}
FILES = 4  # of a checkpoint: the manifest, weights, state, table


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups()


def same_bits(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        theirs = other[key]
        if isinstance(value, numpy.ndarray):
            assert value.dtype == theirs.dtype and value.tobytes() == theirs.tobytes(), key
        else:
            assert value == theirs, key


def close(one, other):
    for key, value in one.items():
        if isinstance(value, numpy.ndarray):
            tolerance = 2e-3 if "half.weight" in key or "half.in_place" in key else 2e-5
            numpy.testing.assert_allclose(other[key].astype("f8"), value.astype("f8"), rtol=tolerance, atol=tolerance, err_msg=key)
        else:
            assert value == other[key], key


def told(outcomes):
    """The error that all ranks have; outcomes: of each rank, an error or a sequence that begins with one."""
    texts = [outcome if isinstance(outcome, str) else outcome[0] for outcome in outcomes]
    assert texts == texts[:1] * len(texts), texts
    assert texts[0].startswith("CheckpointError"), texts[0]
    return texts[0]


# ---- what comes back ------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_everything_comes_back(groups, tmp_path, rule):
    """The same bits, and ten steps later still, at every stage; every rank has the same."""
    before, after = {}, {}
    for stage in (0, 1, 2):
        outcomes = groups(2).run(rank_checkpoint.saved, str(tmp_path / str(stage)), stage=stage, **RULES[rule])
        same_bits(outcomes[0][0], outcomes[1][0])
        before[stage], after[stage] = outcomes[0]
    for source, stage in ((0, 2), (1, 0), (2, 1), (2, 2)):
        for start, end in groups(2).run(rank_checkpoint.loaded, str(tmp_path / str(source)), stage=stage, **RULES[rule]):
            same_bits(before[source], start)
            same_bits(after[source], end)


@pytest.mark.parametrize("ranks, others", [(1, 3), (3, 2), (2, 4), (4, 1)])
def test_other_numbers_of_ranks(groups, tmp_path, ranks, others):
    (before, after), *_ = groups(ranks).run(rank_checkpoint.saved, str(tmp_path), stage=ranks % 3)
    for start, end in groups(others).run(rank_checkpoint.loaded, str(tmp_path), stage=others % 3):
        same_bits(before, start)
        close(after, end)


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_between_backward_and_step(groups, tmp_path, stage):
    """Also when rank 1 alone has had a backward."""
    for with_save, without in groups(2).run(rank_checkpoint.between_backward_and_step, str(tmp_path), stage):
        assert with_save == without


def test_group_values_survive(groups, tmp_path):
    (found, are_tuples), _ = groups(2).run(rank_checkpoint.group_values, str(tmp_path))
    assert found == {"initial_lr": 0.3, "tag": "ü", "flags": [True, None], "more": {"a": [1, 2.5]}, "big": 2**70,
                     "lr": float(numpy.float32(0.1))}
    assert are_tuples


def test_the_format_is_as_documented(groups, tmp_path):
    """safetensors reads the files; the sums are what the documentation says."""
    safetensors = pytest.importorskip("safetensors.numpy")
    (before, _), _ = groups(2).run(rank_checkpoint.saved, str(tmp_path))
    weights = safetensors.load_file(next(tmp_path.glob("weights-*")))
    state = safetensors.load_file(next(tmp_path.glob("state-*")))
    assert weights.keys() == {name for name, *_ in rank_checkpoint.SIZES}
    for name, shape, _ in rank_checkpoint.SIZES:
        assert weights[name].shape == shape and weights[name].tobytes() == before[f"{name}.weight"].tobytes()
        assert state[f"exp_avg/{name}"].tobytes() == before[f"{name}.exp_avg"].tobytes()
    assert state["master/half"].dtype == numpy.float32
    assert rank_checkpoint.checked_blocks(tmp_path) == 0


# ---- what each rank reads and holds -------------------------------------------------------


def test_ranks_read_their_ranges_only(groups, tmp_path):
    elems = 400_000
    sizes = [["w", [elems], "f4"]]
    groups(4).run("rank_checkpoint:saved", str(tmp_path), sizes=sizes, groups=1, steps=1, bucket_mb=0.25)
    for total, largest in groups(4).run(rank_checkpoint.bytes_read, str(tmp_path), 2, sizes):
        # weight and two moments, read to be checked and read to be taken; blocks at the edges are checked by both
        assert total < 2.2 * 3 * 4 * elems / 4, total
        assert largest <= 1 << 20


MEBI = 1 << 20


@pytest.mark.parametrize("stage, sizes", [(0, [("w", [4 * MEBI], "f4")]), (1, [("w", [4 * MEBI], "f4")]), (2, [("w", [8 * MEBI], "f4")]),
                                          (2, [("half", [8 * MEBI], "f2")]), (1, [(f"p{k}", [25], "f4") for k in range(4000)])],
                         ids=("stage 0", "stage 1", "stage 2", "16 bits", "many"))
def test_saving_holds_one_block(groups, tmp_path, stage, sizes):
    """Besides what is known of each tensor."""
    for peak in groups(2).run(rank_checkpoint.peak_while_saving, str(tmp_path), stage, sizes):
        assert peak < 2 * MEBI + 6000 * len(sizes), peak


# ---- cut short ------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_may_be_killed_anywhere(groups, tmp_path, rank):
    """At every sixth system call of a rank (test_fault_files.py has all): the folder has the old checkpoint or the new one, and
    the next save cleans up."""
    folder = str(tmp_path / "here")
    (start, _), _ = groups(2).run(rank_checkpoint.saved, folder)
    old = rank_checkpoint.digest(start)
    calls = groups(2).run(rank_checkpoint.save_with_trouble, str(tmp_path / "other"), rank, 0, False)[rank][0]
    assert calls >= 6
    seen = set()
    for at in range(calls, 0, -6):
        with RankGroup(2) as group:
            outcomes = group.run(rank_checkpoint.save_with_trouble, folder, rank, at, True, check=False)
        assert outcomes[rank].exit_code == -9
        assert "PeerLost" in outcomes[1 - rank].error or outcomes[1 - rank].value is None or "PeerLost" in outcomes[1 - rank].value[1]
        found = groups(1).run(rank_checkpoint.digest_of, folder)[0]
        new = found != old
        seen.add(new)
        again, _ = groups(2).run(rank_checkpoint.save_with_trouble, folder, rank, 0, False)
        assert again[1] == "" and (not new or again[3] == found)
        assert groups(1).run(rank_checkpoint.digest_of, folder)[0] == again[3]
        assert len(os.listdir(folder)) == FILES
        groups(2).run(rank_checkpoint.saved, folder)
    assert seen == ({False, True} if rank == 0 else {False})


@pytest.mark.parametrize("background", [False, True])
def test_closing_that_fails_is_no_failure(groups, tmp_path, background):
    counts = groups(2).run(rank_checkpoint.saved_on_a_system_that_lets_go_badly, str(tmp_path / "here"), background)
    assert all(count >= 3 for count in counts), counts


def test_a_killed_rank_leaves_no_lock_to_its_children(groups, tmp_path):
    """As a worker of a data loader may live on for seconds, while the ranks start again and save."""
    folder = tmp_path / "here"
    ranks = RankGroup(2)
    ranks.start(rank_checkpoint.dies_in_a_save_with_a_child, str(folder))
    outcomes = ranks.wait(30)
    child = int(folder.with_suffix(".child").read_text())
    try:
        assert outcomes[0].exit_code == -9 and "PeerLost" in outcomes[1].value
        assert groups(2).run(rank_checkpoint.save_as, str(folder)) == ["", ""]
        os.kill(child, 0)
    finally:
        os.kill(child, 9)
    assert len(os.listdir(folder)) == FILES
    ranks.close()


@pytest.mark.parametrize("rank", (0, 1))
def test_every_call_of_a_save_may_fail(groups, tmp_path, rank):
    for wrong, calls in groups(2).run(rank_checkpoint.every_error_of_a_save, str(tmp_path), rank):
        assert not wrong, "\n".join(wrong)
        assert calls >= (15 if rank == 0 else 8)


@pytest.mark.parametrize("rank", (0, 1))
def test_every_call_of_a_load_may_fail(groups, tmp_path, rank):
    for wrong, calls in groups(2).run(rank_checkpoint.every_error_of_a_load, str(tmp_path), rank):
        assert not wrong, "\n".join(wrong)
        assert calls >= 10


def test_save_returns_when_the_checkpoint_is_there(groups, tmp_path):
    assert groups(2).run(rank_checkpoint.save_then_read, str(tmp_path)) == [True, True]


# ---- damaged, foreign, other ------------------------------------------------------------


@pytest.mark.parametrize("kind", ("cut", "flip"))
def test_damage_is_found(groups, tmp_path, kind):
    for wrong, tried, found in groups(2).run(rank_checkpoint.damage, str(tmp_path), kind, 1):
        assert not wrong, "\n".join(wrong[:5])
        assert found >= 0.95 * tried, (found, tried)


def test_damage_names_the_tensor(groups, tmp_path):
    """Also in files that another order of parameters has written."""
    groups(2).run(rank_checkpoint.saved_in_small_blocks, str(tmp_path), [0, 1, 2, 3, 4, 5])
    for order in ([4, 1, 2, 5, 0, 3], [0, 3, 2, 1, 4, 5]):
        for wrong, tried in groups(2).run(rank_checkpoint.damage_of_each, str(tmp_path), order):
            assert not wrong, "\n".join(wrong[:3])
            assert tried == 3 * 6 * 3


def test_what_is_behind_4_gib():
    """Places in files are 64-bit numbers."""
    first, size = (4 << 30) - 64, (4 << 30) + 3 * (1 << 20)
    data = {offset: bytes([number + 1]) * length for number, (offset, length) in enumerate(
        [(first, 64), (4 << 30, 1 << 20), ((4 << 30) + (1 << 20), 100), ((4 << 30) + (1 << 20) + 100, (2 << 20) - 100 - (1 << 20)),
         ((4 << 30) + (2 << 20), 1 << 20)])}
    table = numpy.array([(0, len(block), offset, checksum(block)) for offset, block in data.items()], _blocks.LINE)
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate(size)
        for offset, block in data.items():
            _blocks.write_exactly(sparse.fileno(), offset, block)
        blocks = _blocks.Blocks([(sparse.fileno(), "sparse", first, size)], table, "table")
        pieces = numpy.zeros(2, _blocks.PIECE)
        pieces["item"], pieces["elem_bytes"] = [0, 1], 2
        pieces["first"], pieces["last"] = [(4 << 30) - 10, (4 << 30) + (1 << 20) + 90], [(4 << 30) + 10, size - 6]
        pieces = blocks.cut(0, pieces)
        places = {offset: bytes(view) for view, begin, stop in blocks.read(0, pieces, ["before", "behind"])
                  for offset in (pieces["first"][begin:stop] - pieces["at"][begin:stop]).tolist()}
        assert list(places.items()) == list(data.items())
        assert bytes(_blocks.read_exactly(sparse.fileno(), (4 << 30) - 1, 2, "sparse")) == b"\1\2"
        _blocks.write_exactly(sparse.fileno(), (4 << 30) + (2 << 20), b"x")
        with pytest.raises(_blocks.CheckpointError, match=f"bytes {(4 << 30) + (2 << 20)} to {size} .*'behind'"):
            list(blocks.read(0, pieces, ["before", "behind"]))


@pytest.mark.parametrize("kind", ("weights", "state"))
def test_a_file_that_changes_between_the_two_readings(groups, tmp_path, kind):
    """What is taken is what was checked, or the error says that the load is half done."""
    outcomes = groups(2).run(rank_checkpoint.changes_between_readings, str(tmp_path / "here"), kind)
    assert "half done" in told(outcomes) and "'w'" in told(outcomes).replace("exp_avg_sq/", ""), told(outcomes)
    assert [mended for _, mended in outcomes] == [True, True]


@pytest.mark.parametrize("what, words", [("edges", "a block ends inside an element"), ("overlap", "two tensors share bytes")])
def test_places_that_zero_c_does_not_write(groups, tmp_path, what, words):
    outcomes = groups(2).run(rank_checkpoint.other_places, str(tmp_path / "here"), what)
    assert words in told(outcomes) and "half done" not in told(outcomes)
    assert [unchanged for _, unchanged in outcomes] == [True, True]


def test_lines_of_parts_must_fit():
    with zero_c.init(0, 1) as comm:
        opt = zero_c.ShardedOptimizer([("w", numpy.zeros(10, "f4"))], comm=comm)
        room = bytes(range(40))
        for line in ([1, 0, 1, 0], [-1, 0, 1, 0], [0, -1, 1, 0], [0, 5, 4, 0], [0, 0, 11, 0], [0, 0, 10, 1], [0, 0, 1, 41], [0, 0, 1, -4],
                     [0, 0, 1, 37], [0, 0, 2**62, 0]):
            with pytest.raises(ValueError, match="they must fit"):
                opt._engine.write_parts("weight", numpy.array([[0, 0, 10, 0], line]), room)
        with pytest.raises(ValueError, match="no lines"):
            opt._engine.write_parts("weight", b"12345", room)
        assert not opt.param(0).any()
        opt._engine.write_parts("weight", numpy.array([[0, 4, 10, 16], [0, 0, 4, 0]]), room)
        assert opt.param(0).tobytes() == room
        del opt


def test_long_names_are_told(groups, tmp_path):
    """A path does not leave a tensor's name out."""
    folder = tmp_path.joinpath(*["x" * 250] * 4)
    groups(2).run(rank_checkpoint.saved, str(folder))
    path = next(folder.glob("state-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    text = told(groups(2).run(rank_checkpoint.refused, str(folder)))
    assert len(text) > 2000 and "tensor" in text and text.endswith("the file is damaged"), text


def test_manifests_may_say_anything(groups, tmp_path):
    for wrong, errors in groups(2).run(rank_checkpoint.fuzz, str(tmp_path), 1, 400):
        assert not wrong, "\n".join(wrong[:3])
        assert errors > 250


@pytest.mark.long
def test_more_damage(groups, tmp_path):
    seed = 2
    for wrong, *_ in groups(2).run(rank_checkpoint.damage, str(tmp_path / "flip"), "flip", seed, deadline=600):
        assert not wrong, "\n".join(wrong[:5])
    for wrong, *_ in groups(2).run(rank_checkpoint.fuzz, str(tmp_path / "fuzz"), seed, 4000, deadline=600):
        assert not wrong, "\n".join(wrong[:3])


def sealed(folder, change):
    from zero_c import _checkpoint
    path = Path(folder) / "zero_c.json"
    manifest = _checkpoint.unseal(path.read_bytes(), path)
    change(manifest)
    path.write_bytes(_checkpoint.seal(manifest))


@pytest.mark.parametrize("what", ("version", "format", "no json", "not ours", "no manifest", "no folder", "no weights", "no state",
                                  "no blocks", "outside", "another save"))
def test_what_is_no_checkpoint(groups, tmp_path, what):
    folder = tmp_path / "here"
    groups(2).run(rank_checkpoint.saved, str(folder))
    files = {name: next(folder.glob(f"{name}-*")) for name in ("weights", "state", "blocks")}
    words = {"version": "newer one", "format": "the manifest of a 'cake'", "no json": "damaged", "not ours": "no manifest of zero_c",
             "no manifest": "no zero_c.json", "no folder": "no zero_c.json", "outside": "does not write", "another save": "bytes"}
    if what == "version":
        sealed(folder, lambda manifest: manifest.update(version=2))
    elif what == "format":
        sealed(folder, lambda manifest: manifest.update(format="cake"))
    elif what == "no json":
        (folder / "zero_c.json").write_text("not JSON")
    elif what == "not ours":
        (folder / "zero_c.json").write_text(json.dumps({"a": 1}))
    elif what == "no manifest":
        (folder / "zero_c.json").unlink()
    elif what == "no folder":
        folder = tmp_path / "elsewhere"
    elif what == "outside":
        files["weights"].rename(tmp_path / files["weights"].name)
        sealed(folder, lambda manifest: manifest["files"]["weights"].update(name=f"../{files['weights'].name}"))
    elif what == "another save":
        other = tmp_path / "other"
        groups(2).run(rank_checkpoint.saved, str(other), rule="sgd")
        files["state"].write_bytes(next(other.glob("state-*")).read_bytes())
    else:
        files[what.removeprefix("no ")].unlink()
    outcomes = groups(2).run(rank_checkpoint.refused, str(folder))
    assert words.get(what, files.get(what.removeprefix("no "), folder).name) in told(outcomes)
    assert all(unchanged for _, unchanged in outcomes)


OTHERS = {"shape": ({"sizes": [["w", [70, 12], "f4"], *map(list, rank_checkpoint.SIZES[1:])]}, "shape [70, 11]"),
          "name": ({"sizes": [["v", [70, 11], "f4"], *map(list, rank_checkpoint.SIZES[1:])]}, "'v' is not in the checkpoint"),
          "dtype": ({"sizes": [["w", [70, 11], "f8"], *map(list, rank_checkpoint.SIZES[1:])]}, "dtype float32"),
          "fewer": ({"sizes": list(map(list, rank_checkpoint.SIZES[:-1]))}, "the checkpoint has 'late'"),
          "optimizer": ({"rule": "sgd"}, "'adamw'"), "groups": ({"groups": 3}, "2 parameter groups")}


@pytest.mark.parametrize("what", OTHERS)
def test_other_models_are_refused(groups, tmp_path, what):
    groups(2).run(rank_checkpoint.saved, str(tmp_path))
    how, words = OTHERS[what]
    outcomes = groups(2).run(rank_checkpoint.refused, str(tmp_path), **how)
    assert words in told(outcomes) and all(unchanged for _, unchanged in outcomes)


@pytest.mark.parametrize("rule, saved, here", [
    ("sgd", {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.0, "dampening": 0.0}),
    ("sgd", {"momentum": 0.0, "dampening": 0.0}, {"momentum": 0.9, "dampening": 0.1}),
    ("adam", {"amsgrad": True}, {"amsgrad": False}), ("adam", {"amsgrad": False}, {"amsgrad": True})])
def test_options_are_those_of_the_checkpoint(groups, tmp_path, rule, saved, here):
    (before, after), _ = groups(2).run(rank_checkpoint.saved, str(tmp_path), rule=rule, **saved)
    for start, end in groups(2).run(rank_checkpoint.loaded, str(tmp_path), rule=rule, **here):
        same_bits(before, start)
        same_bits(after, end)


@pytest.mark.parametrize("kind", ("function", "array", "set", "keys"))
def test_what_json_cannot_hold_is_refused_first(groups, tmp_path, kind):
    outcomes = groups(2).run(rank_checkpoint.group_value, str(tmp_path / "here"), kind)
    assert "'odd'" in told(outcomes) and "group 0" in told(outcomes) and not any(made for _, made in outcomes)


# ---- ranks that disagree, places -------------------------------------------------------------


@pytest.mark.parametrize("what", ("load", "step", "nothing"))
def test_a_save_on_one_rank_only(tmp_path, what):
    with RankGroup(2) as group:
        first, second = group.run(rank_checkpoint.alone, str(tmp_path / "here"), what, deadline=30)
    assert first.startswith("Mismatch" if what != "nothing" else ("Timeout", "PeerLost")), first
    assert "save" in first and (what == "nothing" or what in first), first
    assert what == "nothing" or ("save" in second and what in second), second
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("limit", (100, 5000))
def test_no_space(groups, tmp_path, limit):
    folder = str(tmp_path / "here")
    outcomes = groups(2).run(rank_checkpoint.no_space, folder, limit)
    assert folder in told(outcomes)
    for _, left, again, unchanged in outcomes:
        assert not left and not again and unchanged
    assert len(os.listdir(folder)) == FILES


SPACE = ["pwrite", "posix_fallocate"]


@pytest.mark.parametrize("what, rank, calls, error", [
    ("save", 0, ["open"], errno.EACCES), ("save", 1, ["open"], errno.EACCES), ("save", 0, ["rename"], errno.EACCES),
    ("load", 0, ["open"], errno.EACCES), ("load", 1, ["open"], errno.EACCES), ("save", 0, SPACE, errno.ENOSPC), ("save", 1, SPACE, errno.ENOSPC)])
def test_one_rank_is_refused_by_the_system(groups, tmp_path, what, rank, calls, error):
    """A disk without space; a folder that is not its own (root may write it all the same, so calls are made to fail)."""
    outcomes = groups(2).run(rank_checkpoint.refused_by_the_system, str(tmp_path / "here"), rank, what, calls, error)
    assert f"rank {rank}" in told(outcomes) and os.strerror(error) in told(outcomes)
    assert [rest for _, *rest in outcomes] == [[True, FILES, ""]] * 2


def test_new_folders_are_flushed(groups, tmp_path):
    """Their names too: each folder that is made, in the one around it."""
    flushed = groups(1).run(rank_checkpoint.flushed_folders, str(tmp_path / "a" / "b" / "c"))[0]
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b"), str(tmp_path / "a" / "b" / "c")} <= set(flushed)


def test_a_folder_that_only_rank_0_sees(groups, tmp_path):
    outcomes = groups(2).run(rank_checkpoint.own_folders, str(tmp_path))
    assert "rank 1" in told([save for save, *_ in outcomes]) and "rank 1" in told([load for _, load, _ in outcomes])
    assert all(len(left) == FILES for *_, left in outcomes)


def test_a_file_in_place_of_the_folder(groups, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in told(groups(2).run(rank_checkpoint.save_as, str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


def test_two_saves_at_once(groups, tmp_path):
    """The second is told, and the first is not disturbed."""
    groups(2).run(rank_checkpoint.saved, str(tmp_path))
    before = groups(1).run(rank_checkpoint.digest_of, str(tmp_path))
    lock = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another save" in told(groups(2).run(rank_checkpoint.save_as, str(tmp_path)))
    finally:
        os.close(lock)
    assert groups(1).run(rank_checkpoint.digest_of, str(tmp_path)) == before
    assert groups(2).run(rank_checkpoint.save_as, str(tmp_path)) == ["", ""]


def test_two_jobs_save_to_one_folder(groups, tmp_path):
    """Each save of both is whole, or told that another is under way."""
    with RankGroup(2) as other:
        for number, group in enumerate((groups(2), other)):
            group.start(rank_checkpoint.job_of_two, str(tmp_path / "here"), number, 8)
        ends = [[outcome.value for outcome in group.wait()] for group in (groups(2), other)]
    texts = []
    for outcomes in ends:
        assert outcomes[0] == outcomes[1]
        texts += outcomes[0][0]
    assert "" in texts and all("another save" in text for text in texts if text), texts
    assert groups(1).run(rank_checkpoint.digest_of, str(tmp_path / "here"))[0] in [outcomes[0][1] for outcomes in ends]
    assert len(os.listdir(tmp_path / "here")) == FILES


def test_what_is_not_ours_stays(groups, tmp_path):
    """Other files of the folder, and a manifest of a newer version."""
    for name in ("weights.safetensors", "weights-mine.safetensors", "notes.txt"):
        (tmp_path / name).write_text(name)
    groups(2).run(rank_checkpoint.save_as, str(tmp_path))
    groups(2).run(rank_checkpoint.save_as, str(tmp_path))
    assert len(os.listdir(tmp_path)) == FILES + 3
    sealed(tmp_path, lambda manifest: manifest.update(version=2))
    newer = (tmp_path / "zero_c.json").read_bytes()
    for text in groups(2).run(rank_checkpoint.save_as, str(tmp_path)):
        assert "version 2" in text
    assert (tmp_path / "zero_c.json").read_bytes() == newer and len(os.listdir(tmp_path)) == FILES + 3


# ---- in the background; test_checkpoint_torch.py has more --------------------------------------


def test_closing_does_not_lose_a_save(groups, tmp_path):
    """The threads ask the communicator nothing."""
    for state, text, error in groups(2).run(rank_checkpoint.closes_meanwhile, str(tmp_path / "here")):
        assert "the communicator is closed" in text and error is None
        assert groups(1).run(rank_checkpoint.digest_of, str(tmp_path / "here")) == [state]
    assert len(os.listdir(tmp_path / "here")) == FILES


@pytest.mark.parametrize("rank", (0, 1))
def test_a_thread_that_does_not_start(groups, tmp_path, rank):
    outcomes = groups(2).run(rank_checkpoint.no_thread, str(tmp_path / "here"), rank)
    assert f"rank {rank}" in told(outcomes) and "new thread" in told(outcomes)
    assert [(again, left) for _, again, left in outcomes] == [("", FILES)] * 2


@pytest.mark.parametrize("fetch", (False, True))
def test_an_error_that_nobody_asks_for(tmp_path, fetch):
    """It is on stderr when the program ends; one that was raised is not told again."""
    environment = {**os.environ, "CHECKPOINT_FOLDER": str(tmp_path / "here"), "CHECKPOINT_FETCH": str(int(fetch)), "PYTHONPATH": python_path()}
    end = subprocess.run([sys.executable, rank_checkpoint.__file__], env=environment, capture_output=True, text=True, timeout=60)
    assert end.returncode == 0, end.stderr
    assert (f"CheckpointError: save to {tmp_path / 'here'} in the background" in end.stderr and "No space" in end.stderr) != fetch, end.stderr
    assert not fetch or not end.stderr
    assert not os.listdir(tmp_path / "here")
