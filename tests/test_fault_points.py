"""A rank dies, is stopped or fails at every place of a run: what its peers do then, and what is left.

Ranks are C programs, so that there is time for every place (tests/c/faults/walk.c). What Python adds, files and torch, is in
test_fault_files.py.
"""

import re

import cuda_build
import fault_build
import pytest
from test_c import CSRC, run

JOBS = 6  # under way at a time: enough to keep two cores busy
DEADLINE_S = 500
VARIANTS = ["start", "0", "1", "2", "3"]


def walk(folder, ranks, variant, manners, places="all", walker=fault_build.walker):
    """Runs the walker; the points that were passed, and those at which a rank met its end."""
    folder.mkdir(exist_ok=True)
    status, output = run([walker(), str(folder / "walk"), str(ranks), variant, manners, places, str(JOBS)], DEADLINE_S)
    assert status == 0, output
    lines = output.splitlines()
    print(*(line for line in lines if not line.startswith(("fault at ", "passed "))), sep="\n")
    met = {line.removeprefix("fault at ") for line in lines if line.startswith("fault at ")}
    return met, met | {line.removeprefix("passed ") for line in lines if line.startswith("passed ")}


# A run with an engine meets its ends behind these; "start" is the variant for them.
BEFORE_AN_ENGINE = {"program: before start", "program: before the move to a GPU"}


def depends_on_time(name):
    return name.startswith(("wait: ", "failure: ", "wake: ", "hub: what is left"))


def test_ranks_come_to_every_point_of_the_core(tmp_path):
    passed = set()
    for variant in (*VARIANTS, "hub"):
        passed |= walk(tmp_path / variant, 2, variant, "")[1]
    missing = {name for name in fault_build.points_in(CSRC) - passed if not depends_on_time(name)}
    assert not missing, f"no run comes to {missing}"


@cuda_build.needs_headers
def test_ranks_with_gpus_come_to_every_point_of_the_backend(tmp_path):
    passed = walk(tmp_path, 2, "1", "", walker=fault_build.gpu_walker)[1]
    missing = {name for name in fault_build.points_in(cuda_build.CUDA) - passed if not depends_on_time(name)}
    assert not missing, f"no run comes to {missing}"


# What peers can see, and by which calls it changes.
VISIBLE = re.compile(r"\b(?:atomic_(?:store|fetch_add|exchange|compare_exchange)\w*|shm_packet_send|mem_post|shm_poison_write)\(")
# Functions whose callers have the points, and what is no state that a peer could wait for.
ELSEWHERE = {
    "store_text": "part of a poison or wait record", "shm_poison_write": "mem_fail has points around it",
    "shm_wait_begin": "look_for_cycles", "shm_wait_beat": "look_for_cycles", "shm_wait_end": "a peer only reads it to find cycles",
    "shm_sleep_prepare": "sleep_once", "transfer": "its callers", "shm_packet_send": "its callers",
    "mem_declare": "only communicators without memory for peers declare", "write_entry": "the same",
    "mem_exchange": "mem_post has the points",
    "post": "mem_post has the points",
}


@pytest.mark.parametrize("source", [source for source in fault_build.CORE if source.name.startswith(("mem_", "shm_"))],
                         ids=lambda source: source.name)
def test_what_peers_see_has_points_beside_it(source):
    for name, body in re.findall(r"^\w[^\n;]*?(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", source.read_text(), re.MULTILINE | re.DOTALL):
        if VISIBLE.search(body) and name not in ELSEWHERE:
            assert "ZC_POINT(" in body, f"{source.name}: {name}() changes what peers see, and has no point"


@pytest.mark.parametrize(("ranks", "variant", "manners"), [(3, "start", "ke"), (2, "0", "ks"), (2, "1", "em"), (2, "2", "km"),
                                                           (2, "3", "ks"), (3, "3", "gd"), (3, "hub", "ks")])
def test_one_place_of_every_point(tmp_path, ranks, variant, manners):
    walk(tmp_path, ranks, variant, manners, "some")


@cuda_build.needs_headers
@pytest.mark.parametrize(("ranks", "variant", "manners"), [(2, "1", "ke"), (3, "3", "k")])
def test_one_place_of_every_point_with_gpus(tmp_path, ranks, variant, manners):
    walk(tmp_path, ranks, variant, manners, "some", fault_build.gpu_walker)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_place(tmp_path, ranks, variant):
    # Two ranks and three meet every end at every place; of four, which two cores run slowly, one does, in turn.
    met, passed = walk(tmp_path, ranks, variant, "ksemg" if ranks == 2 else "ksemgd", "turns" if ranks == 4 else "all")
    if variant != "start":
        passed = {name for name in passed if not name.startswith("start: ") and name not in BEFORE_AN_ENGINE}
    missing = {name for name in passed - met if not depends_on_time(name)}
    assert not missing, f"nobody met an end at {missing}"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_place_between_hosts(tmp_path, ranks):
    met, passed = walk(tmp_path, ranks, "hub", "ksemg")
    missing = {name for name in passed - met if not depends_on_time(name)}
    assert not missing, f"nobody met an end at {missing}"


@pytest.mark.long
@cuda_build.needs_headers
@pytest.mark.parametrize(("ranks", "variant", "manners"), [(2, "start", "ksmg"), (2, "0", "g"), (2, "1", "m"), (2, "2", "k"), (2, "3", "s")])
def test_every_place_with_gpus(tmp_path, ranks, variant, manners):
    walk(tmp_path, ranks, variant, manners, walker=fault_build.gpu_walker)


@pytest.mark.long
@pytest.mark.parametrize("variant", ["0s", "1s", "2s", "1o", "2o"])
def test_every_place_with_shared_parameters_and_overlapping_gathers(tmp_path, variant):
    walk(tmp_path, 2, variant, "kg")
