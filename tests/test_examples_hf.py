"""Scripts of transformers, accelerate and Lightning with a ShardedOptimizer: the losses of their own DDP, the same bits at all
stages, training that goes on from a checkpoint, and loud errors where docs/examples.md has a recipe.

The packages are those of requirements-examples.txt (make test installs them); where they are missing these tests fail.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import rank_examples
from ranks import RankGroup, python_path

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# What zero_c.launch --no-torch-env leaves out.
NO_TORCH = dict.fromkeys("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split())

# Scripts, and how far their losses may be from those of DDP, relatively. DDP adds gradients in another order, and its AdamW
# associates differently: a few units of 2**-24 a step. Under bf16 autocast weights are rounded to 8 bits, so that such a
# difference moves some of them by 2**-8; of 6 steps that leaves some 1e-4 in the loss.
TOLERANCES = {"hf_causal_lm": 4e-4, "hf_classifier": 1e-5, "hf_trainer": 1e-5, "lightning_trainer": 1e-5,
              "lightning_fabric": 4e-4}
RESUMED = {"hf_trainer": 3, "lightning_trainer": 3, "lightning_fabric": 3}
WRITTEN = "RuntimeError: unsupported operation: more than one element of the written-to tensor"


@pytest.fixture(scope="module")
def ours():
    with RankGroup(2, env=OFFLINE | NO_TORCH) as group:
        yield group


@pytest.fixture(scope="module")
def plain():
    """Ranks with torch's variables, under which the packages use DDP."""
    with RankGroup(2, env=OFFLINE, leaks=False) as group:
        yield group


@pytest.fixture(scope="module")
def outcome(ours, plain, tmp_path_factory):
    """(script, stage; None: plain) -> (what each rank's main() returned, folder); each is run once."""
    known = {}

    def find(script, stage):
        if (script, stage) not in known:
            folder = tmp_path_factory.mktemp(script)
            group, which = (plain, ["--ddp"]) if stage is None else (ours, ["--stage", str(stage)])
            known[script, stage] = group.run(rank_examples.run, script, which + folder_of(script, folder), deadline=120), folder
        return known[script, stage]

    return find


def folder_of(script, folder):
    return {"hf_causal_lm": [], "hf_classifier": ["--save", str(folder)]}.get(script, ["--folder", str(folder)])


def mean_losses(values):
    return numpy.mean([value["losses"] for value in values], axis=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", TOLERANCES)
def test_losses_of_data_parallel(outcome, script, stage):
    values, _ = outcome(script, stage)
    expected, _ = outcome(script, None)
    numpy.testing.assert_allclose(mean_losses(values), mean_losses(expected), rtol=TOLERANCES[script])
    if isinstance(values[0]["extra"], dict):  # Adam hides most of what clipping does
        numpy.testing.assert_allclose(values[1]["extra"]["norms"], expected[1]["extra"]["norms"], rtol=10 * TOLERANCES[script])
        assert max(values[1]["extra"]["norms"]) > 0.5, "nothing was clipped"


@pytest.mark.parametrize("script", TOLERANCES)
def test_same_bits_at_all_stages(outcome, script):
    first, second, third = (outcome(script, stage)[0] for stage in (1, 2, 3))
    assert first == second == third


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", RESUMED)
def test_goes_on_from_a_checkpoint(ours, outcome, script, stage):
    whole, folder = outcome(script, stage)
    arguments = ["--stage", str(stage), "--folder", str(folder), "--resume", str(RESUMED[script])]
    rest = ours.run(rank_examples.run, script, arguments, deadline=120)
    for resumed, complete in zip(rest, whole, strict=True):
        count = len(complete["losses"]) // 2
        assert len(resumed["losses"]) >= count
        assert resumed["losses"][-count:] == complete["losses"][-count:]


def test_saved_model_is_found_by_from_pretrained(ours, outcome):
    found = [ours.run(rank_examples.saved_classifier, str(outcome("hf_classifier", stage)[1]), deadline=60)[0]
             for stage in (1, 2, 3)]
    assert numpy.isfinite(found[0]).all()
    assert all(numpy.array_equal(found[0], other) for other in found)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_trainer_cannot_clip_by_itself(ours, tmp_path, stage, max_grad_norm):
    for message, unchanged in ours.run(rank_examples.trainer_alone, stage, max_grad_norm, str(tmp_path), deadline=60):
        assert message.startswith(WRITTEN), message
        assert unchanged


# As a user meets it, with processes that end: a gloo group is out of step after an error on one rank.
WRAPPED = {
    "accelerate": ("hf_causal_lm", WRITTEN + "|is written while its values are not there"),
    "Trainer": ("hf_trainer", "is not where the optimizer put it|is written while its values are not there"),
    "Lightning": ("lightning_trainer", WRITTEN),
}


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
@pytest.mark.parametrize("package", WRAPPED)
def test_wrapped_in_ddp(tmp_path, package, stage):
    """With torch's variables these packages take the model for their own; the error must tell."""
    script, patterns = WRAPPED[package]
    program = ROOT / f"examples/{script}.py"
    if package == "Lightning":  # which only does so where it is told to
        source = program.read_text().replace('{"devices": 1, "strategy": "auto"}', '{"devices": 2, "strategy": "ddp"}')
        assert source != program.read_text()
        program = tmp_path / "with_ddp.py"
        program.write_text(source)
    done = launch([program, "--stage", str(stage), *folder_of(script, tmp_path)])
    assert done.returncode != 0, done.stdout
    assert re.search(patterns, done.stderr), done.stderr


def launch(command, *options):
    return subprocess.run([sys.executable, "-m", "zero_c.launch", "-n", "2", *options, *command], text=True, capture_output=True,
                          timeout=120, env=os.environ | OFFLINE | {"PYTHONPATH": str(ROOT / "examples") + os.pathsep + python_path()})


def test_command_of_the_script(tmp_path):
    done = launch([ROOT / "examples/hf_trainer.py", "--stage", "2", "--steps", "2", "--folder", tmp_path], "--no-torch-env")
    assert done.returncode == 0, done.stderr
    assert "loss of rank 0" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]
