"""Checkpoints of torch models: every number of ranks and every stage loads what any other has saved.

rank_checkpoint_torch.py has the model and what the ranks do.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch")

import rank_checkpoint_torch as on_ranks  # noqa: E402
from ranks import RankGroup, rank_groups  # noqa: E402
from test_checkpoint import told  # noqa: E402

import zero_c  # noqa: E402
from zero_c.torch import ShardedOptimizer  # noqa: E402

STAGES = (0, 1, 2, 3)
FILES = 4
# (ranks, stage) of a save, and of a load
SOME = [((1, 0), (2, 3)), ((2, 1), (3, 2)), ((2, 3), (1, 1)), ((3, 2), (4, 3)), ((4, 3), (2, 2)), ((4, 1), (3, 0)), ((3, 3), (3, 1))]


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups()


def compare(after, resumed, ranks, others, dtype="float32"):
    """Losses of ten steps, each rank's; with as many ranks bit for bit, else the means within the order of sums.

    In bfloat16 each rank's gradient is rounded to 8 bits before the sum, so that other ranks move the masters otherwise, and
    some weights by a last bit (2^-8 of them), which goes up and down: the mean loss differs by up to 1e-4 of it. A resumed
    run without its moments or step counts is off by more than 2^-10 from the second step on. The first loss is of weights that
    are the same; masters are compared bit for bit elsewhere.
    """
    if ranks == others:
        assert after == resumed
        return
    after, resumed = numpy.mean(after, axis=0), numpy.mean(resumed, axis=0)
    numpy.testing.assert_allclose(resumed[0], after[0], rtol=2e-5)
    numpy.testing.assert_allclose(resumed, after, rtol=2e-5 if dtype == "float32" else 2**-11)


@pytest.mark.parametrize("source, target", SOME, ids=[f"N{a}-stage{b}-to-N{c}-stage{d}" for (a, b), (c, d) in SOME])
def test_a_checkpoint_loads_anywhere(groups, tmp_path, source, target):
    folder = str(tmp_path / "here")
    after = groups(source[0]).run(on_ranks.saved, folder, source[1])
    resumed = groups(target[0]).run(on_ranks.loaded, folder, target[1])
    compare(after, resumed, source[0], target[0])


@pytest.mark.parametrize("rule", ("amsgrad", "sgd", "plain"))
def test_every_pair_of_stages(groups, tmp_path, rule):
    """All stages of two ranks, loaded by all stages: the same bits, ten steps later still."""
    folders = [str(tmp_path / str(stage)) for stage in STAGES]
    after = groups(2).run(on_ranks.all_saves, list(zip(folders, STAGES)), rule=rule)
    pairs = list(itertools.product(folders, STAGES))
    for rank, resumed in enumerate(groups(2).run(on_ranks.all_loads, pairs, rule=rule)):
        assert after[rank] == after[rank][:1] * 4 and resumed == after[rank][:1] * 16


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (2, "float32"), (3, "bfloat16"), (4, "float32")])
def test_all_pairs(groups, tmp_path, ranks, dtype):
    folders = [str(tmp_path / str(stage)) for stage in STAGES]
    after = groups(ranks).run(on_ranks.all_saves, list(zip(folders, STAGES)), dtype=dtype, deadline=300)
    for others in (1, 2, 3, 4):
        pairs = list(itertools.product(range(4), STAGES))
        resumed = groups(others).run(on_ranks.all_loads, [(folders[k], stage) for k, stage in pairs], dtype=dtype, deadline=300)
        for at, (k, _) in enumerate(pairs):
            compare([rank[k] for rank in after], [rank[at] for rank in resumed], ranks, others, dtype)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float64"))
@pytest.mark.parametrize("stages", ((3, 1), (0, 3)))
def test_other_dtypes(groups, tmp_path, dtype, stages):
    """Masters come back with all their bits."""
    folder = str(tmp_path / "here")
    options = {"loss_scale": 64.0} if dtype == "float16" else {}
    after = groups(2).run(on_ranks.saved, folder, stages[0], dtype=dtype, **options)
    assert groups(2).run(on_ranks.loaded, folder, stages[1], dtype=dtype, **options) == after


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("idle", (False, True), ids=("all ranks", "rank 1 alone"))
def test_between_backward_and_step(groups, tmp_path, stage, idle):
    groups(2).run(on_ranks.between_backward_and_step, str(tmp_path), stage, idle)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_load_into_a_plain_model(groups, tmp_path, stage):
    for text in groups(2).run(on_ranks.tied_and_frozen, str(tmp_path), stage):
        assert text.startswith("CheckpointError"), text


@pytest.mark.parametrize("stage", (1, 3))
def test_inside_gathered_and_no_sync(groups, tmp_path, stage):
    groups(2).run(on_ranks.inside_gathered, str(tmp_path), stage)


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_frozen_is_trained(groups, tmp_path, stage):
    for text in groups(2).run(on_ranks.frozen_otherwise, str(tmp_path), stage):
        assert text.startswith("CheckpointError") and "frozen" in text, text


@pytest.mark.parametrize("stage", (2, 3))
@pytest.mark.parametrize("how, words", [({"rule": "sgd"}, "optimizer 'adamw'"), ({"dtype": "bfloat16"}, "dtype float32")])
def test_another_optimizer_is_refused(groups, tmp_path, stage, how, words):
    folder = str(tmp_path / "here")
    groups(2).run(on_ranks.saved, folder, stage)
    for text in groups(2).run(on_ranks.refused, folder, stage, **how):
        assert text.startswith("CheckpointError") and words in text, text


@pytest.mark.parametrize("stage", (0, 3))
def test_damaged_weights_change_nothing(groups, tmp_path, stage):
    folder = tmp_path / "here"
    groups(2).run(on_ranks.saved, str(folder), stage, loss_scale="dynamic")
    path = next(folder.glob("state-*"))
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    for text in groups(2).run(on_ranks.refused, str(folder), stage, loss_scale="dynamic"):
        assert text.startswith("CheckpointError") and path.name in text, text


@pytest.mark.parametrize("stage", (1, 3))
def test_loss_scale_goes_on(groups, tmp_path, stage):
    assert groups(2).run(on_ranks.loss_scale, str(tmp_path), stage) == [8.0, 8.0]


@pytest.mark.parametrize("stage", (1, 3))
def test_loss_scales_of_other_settings(groups, tmp_path, stage):
    groups(2).run(on_ranks.loss_scales, str(tmp_path), stage)


@pytest.mark.parametrize("stage", (2, 3))
def test_a_learning_rate_may_be_a_tensor(groups, tmp_path, stage):
    for found in groups(2).run(on_ranks.tensor_lr, str(tmp_path), stage):
        assert found == [[True, True, "even 0", 0.3]] * 2


def test_a_group_that_was_added(groups, tmp_path):
    assert groups(2).run(on_ranks.added_group, str(tmp_path), 1) == [0.5, 0.5]


def test_a_buffer_of_another_dtype_is_named(groups, tmp_path):
    for text, made in groups(1).run(on_ranks.odd_buffer, str(tmp_path / "here")):
        assert "'phase'" in text and "complex64" in text and not made


# ---- in the background ------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_training_on_does_not_change_what_is_saved(groups, tmp_path, stage):
    for after, resumed in groups(2).run(on_ranks.trains_on, str(tmp_path / "here"), stage):
        assert after == resumed


@pytest.mark.parametrize("rank", (0, 1))
def test_a_thread_that_cannot_write(groups, tmp_path, rank):
    outcomes = groups(2).run(on_ranks.fails_in_thread, str(tmp_path), 2, rank)
    for text, left, _, later in outcomes:
        assert text.startswith("CheckpointError") and f"rank {rank}" in text and "No space" in text, text
        assert left == later == FILES, (left, later)


def test_a_thread_that_says_it_is_done_late(groups, tmp_path):
    for text, files in groups(2).run(on_ranks.says_that_it_is_done_late, str(tmp_path)):
        assert text.startswith("CheckpointError") and "rank 0" in text and "No space" in text, text
        assert len(files) == FILES, files


def test_a_rank_that_ends_meanwhile(groups, tmp_path):
    folder = str(tmp_path / "here")
    with RankGroup(2, leaks=False) as group:
        left, lost = group.run(on_ranks.dies_in_thread, folder, check=False)
    text, seconds, files = left.value
    assert lost.exit_code == -9
    assert text.startswith("PeerLost") and "rank 1" in text, text
    assert seconds < 30  # the thread would wait 600 s for a rank that lives
    assert files == FILES
    groups(1).run(on_ranks.loaded, folder, 1)


def test_a_fork_does_not_keep_the_lock(groups, tmp_path):
    assert groups(2).run(on_ranks.forks_meanwhile, str(tmp_path)) == ["", ""]


def test_the_interpreter_may_end_at_once(groups, tmp_path):
    """What was begun is finished."""
    tests = Path(on_ranks.__file__).parent
    package = str(Path(sys.modules["zero_c"].__file__).parent.parent)
    base = {**os.environ, "CHECKPOINT_FOLDER": str(tmp_path / "new"), "ZERO_C_WORLD_SIZE": "2", "ZERO_C_JOB": f"ends{os.getpid()}",
            "PYTHONPATH": os.pathsep.join([package, str(tests)]), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, on_ranks.__file__], env={**base, "ZERO_C_RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    groups(2).run(on_ranks.saved, str(tmp_path / "other"), 2)
    (tmp_path / "other-everything.pt").rename(tmp_path / "new-everything.pt")
    groups(1).run(on_ranks.loaded, str(tmp_path / "new"), 1)
    assert len(os.listdir(tmp_path / "new")) == FILES


@pytest.mark.parametrize("then", ("save", "async_save", "load"))
def test_the_next_call_hears_of_an_error(groups, tmp_path, then):
    text = told(groups(2).run(on_ranks.fails_then, str(tmp_path / "here"), then))
    assert "rank 1" in text and "No space" in text and str(tmp_path / "here") in text, text
    assert len(os.listdir(tmp_path / "here")) == FILES


@pytest.mark.parametrize("how", ("save", "async_save", "save_weights"))
def test_no_memory_on_one_rank(groups, tmp_path, how):
    """Its peers are not left alone with a parameter that all put together."""
    outcomes = groups(2).run(on_ranks.no_memory, str(tmp_path / "here"), how)
    assert "rank 0" in told(outcomes) and "MemoryError: no memory for this buffer" in told(outcomes)
    assert [again for _, again in outcomes] == ["", ""]


@pytest.mark.parametrize("stage, dtype, layers, width", [(3, "float32", 4, 1024), (3, "bfloat16", 4, 1024), (1, "bfloat16", 4, 1024),
                                                         (3, "float32", 300, 8)])
def test_saving_holds_one_block(groups, tmp_path, stage, dtype, layers, width):
    for peak in groups(2).run(on_ranks.peak_while_saving, str(tmp_path), stage, dtype, layers, width):
        assert peak < (2 << 20) + 6000 * layers, peak


@pytest.mark.parametrize("saver, loader", [(3, 0), (3, 2), (0, 3), (1, 1)])
def test_damage_names_the_tensor(groups, tmp_path, saver, loader):
    """Frozen parameters are elsewhere in the files of stage 3, and groups may list their parameters in another order."""
    for wrong, tried in groups(2).run(on_ranks.damage_between_stages, str(tmp_path), saver, loader):
        assert not wrong, "\n".join(wrong[:3])
        assert tried == 6 + 2 * 4


def test_names_are_told_apart_when_the_optimizer_is_made():
    twice = [("a", torch.nn.Parameter(torch.ones(2))), ("a", torch.nn.Parameter(torch.ones(3)))]
    with zero_c.init(0, 1) as comm:
        with pytest.raises(ValueError, match="two parameters are named 'a': in group 0 and in group 0"):
            ShardedOptimizer(twice, optimizer="sgd", lr=0.1, comm=comm)
        opt = ShardedOptimizer(twice[:1], optimizer="sgd", lr=0.1, comm=comm)
        with pytest.raises(ValueError, match="another parameter of this optimizer is named 'a'"):
            opt.add_param_group({"params": twice[1:]})


# ---- the weights alone ------------------------------------------------------------------


@pytest.mark.parametrize("ranks, stage, dtype", [(1, 3, "bfloat16"), (2, 0, "float32"), (2, 1, "bfloat16"), (2, 2, "float32"), (2, 3, "float32"),
                                                 (3, 0, "bfloat16"), (3, 2, "bfloat16"), (3, 3, "bfloat16"), (1, 1, "float32")])
def test_weights_alone(groups, tmp_path, ranks, stage, dtype):
    mask = os.umask(0)
    os.umask(mask)
    for left, mode in groups(ranks).run(on_ranks.weights_alone, str(tmp_path), stage, dtype):
        assert left == [f"weights {stage}.safetensors"] and mode == 0o666 & ~mask


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("what", ("parent is a file", "is a folder", "no folder", "nothing", "own folders", "open", "pwrite", "fsync", "rename"))
def test_weights_that_cannot_be_written(groups, tmp_path, rank, what):
    """All ranks are told the same, nothing is left, and what was there stays; a file of the user's beside it too."""
    if rank == 1 and what not in ("open", "pwrite", "fsync"):
        return
    for name in ("folder", "rank 0", "rank 1"):
        (tmp_path / name).mkdir()
    for name in ("file", "w", "w.new", "folder/mine"):
        (tmp_path / name).write_text("mine")
    before = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    outcomes = groups(2).run(on_ranks.weights_refused, str(tmp_path), rank, what)
    assert f"rank {1 if what == 'own folders' else rank}" in told(outcomes)
    for _, left, held in outcomes:
        assert left == before and not held
    for name in ("file", "w", "w.new", "folder/mine"):
        assert (tmp_path / name).read_text() == "mine"
