"""A rank dies, is stopped or fails in the midst of saving, loading and training in Python: what its peers do, and what is left.

fault_ranks.py walks over the places; test_fault_points.py has those in the core, with C ranks.
"""

import os
import sys
from pathlib import Path

import fault_build
import pytest
from ranks import python_path
from test_c import run

DEADLINE_S = 500
OPERATIONS = "construction,load,forward,backward,step,save,async_save,async_save alone,close"


def walk(folder, *arguments):
    """Runs fault_ranks.py, whose ranks have the package with points."""
    folder.mkdir(exist_ok=True)
    environment = {"LD_PRELOAD": fault_build.preload(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([str(fault_build.package()), python_path()])}
    status, output = run([sys.executable, str(Path(__file__).with_name("fault_ranks.py")), str(folder), *arguments], DEADLINE_S,
                         environment)
    assert status == 0, output
    print(output)


def test_files_in_the_middle_of_a_write(tmp_path):
    walk(tmp_path, "numpy", "3", "2", "save,load", "kf", "one")


def test_torch_ranks_in_every_operation(tmp_path):
    walk(tmp_path, "torch", "2", "3", OPERATIONS, "k", "one")


@pytest.mark.long
def test_torch_ranks_at_every_stage(tmp_path):
    walk(tmp_path / "ends", "torch", "2", "1,2,3", OPERATIONS, "kr", "one")
    # Without the thread that waits alone: for a rank that is stopped it has ten minutes, and no timeout of a call.
    walk(tmp_path / "stops", "torch", "2", "1,2,3", "construction,load,backward,step,save,async_save,close", "s", "one")


@pytest.mark.long
@pytest.mark.parametrize("manners", ["k", "f", "es"])
@pytest.mark.parametrize("operation", ["save", "load"])
def test_every_place_of_files_with_two_ranks(tmp_path, operation, manners):
    walk(tmp_path, "numpy", "2", "2", operation, manners, "all")


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["2", "3", "4"])
def test_every_point_of_files(tmp_path, ranks):
    # What is done to files does not depend on the stage.
    walk(tmp_path, "numpy", ranks, "0,1" if ranks == "2" else "2", "save,load", "kesf", "turns" if ranks == "4" else "some")


@pytest.mark.long
def test_saving_in_the_background(tmp_path):
    walk(tmp_path, "torch", "2", "3", "async_save", "kf", "some")
