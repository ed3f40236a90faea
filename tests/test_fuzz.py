"""Every target of tests/fuzz reads a fixed number of inputs, the same each time; `make fuzz` looks for new ones.

The targets in C are built with the address and undefined behaviour sanitizers.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parent / "fuzz"
sys.path.insert(0, str(FUZZ))

import run as fuzz  # noqa: E402
from faults import FAULTS  # noqa: E402

# Inputs: a second or two for each target on one core.
RUNS = {"rendezvous": 100, "guest": 400, "hub": 500, "rank": 1000, "listener": 80, "manifest": 150, "tensors": 100, "foreign": 30,
        "plan": 200, "environment": 500, "handshake": 3000, "dlpack": 3000}


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_target(target, tmp_path):
    for number, data in enumerate(fuzz.seeds(target)):
        (tmp_path / f"{number:04}").write_bytes(data)
    count, found, output = fuzz.run(target, "plain", tmp_path, runs=RUNS[target])
    assert found is None, f"the input {found!r}:\n{output[-6000:]}"
    assert count >= len(fuzz.seeds(target)), output


# ---- that a target can fail ------------------------------------------------------

ROOT = FUZZ.parent.parent
MOST_RUNS = 40000
SLOW = {"foreign": 3000, "listener": 4000, "manifest": 8000, "tensors": 8000, "rendezvous": 8000}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The sources once more, and no findings of earlier runs."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("csrc", "examples", "tests", "zero_c"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "findings"))
    shutil.copy2(ROOT / "setup.py", folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_mistake_is_found(copy, target):
    name, right, wrong = FAULTS[target]
    path = copy / name
    kept = path.read_text()
    assert kept.count(right) == 1, f"{name} has changed; faults.py needs another mistake for {target}"
    path.write_text(kept.replace(right, wrong))
    try:
        if target == "dlpack":
            subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=copy, check=True,
                           env={**os.environ, "ZERO_C_CUDA": "0"})
        command = [sys.executable, "tests/fuzz/run.py", target, "--plain", "--runs", str(SLOW.get(target, MOST_RUNS))]
        done = subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True)
        assert done.returncode == 1 and "a finding after" in done.stdout, done.stdout + done.stderr
        print(done.stdout[-300:])
    finally:
        path.write_text(kept)
