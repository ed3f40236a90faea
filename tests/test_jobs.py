"""Several jobs on one host that begin at the same moment, with the same port: ranks of two never meet, and nobody waits in vain.

Names of hosts are made up here, as in test_hosts.py: what goes by TCP is on this host's loopback.
"""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import RANK_VARIABLES, RankGroup, free_port
from test_init_launch import PACKAGE_ROOT

import zero_c
from zero_c import _init

JOBS, RANKS = 3, 2
ALONE = {name: None for name in RANK_VARIABLES}
# How long ranks of a job whose others were refused wait for them, and how long all may be late.
IN_VAIN_S, LATE_S = 3, 30
# What differs between jobs, {} is the job's number; all have one MASTER_PORT. What is None on one host is on two.
NAMED = {"run": {"TORCHELASTIC_RUN_ID": "run {}"}, "name": {"ZERO_C_JOB": "job {}"}, "name and token": {"ZERO_C_JOB": "job {}", "ZERO_C_TOKEN": "{}"}}
TOKENS = {"TORCHELASTIC_RUN_ID": "none", "ZERO_C_TOKEN": "token {}"}
# What a rank may be told that is not of the job that has the name or the port, and where it came to it later, its rank 0.
TAKEN = {
    "one": r"is already being started on this host by another rank 0 \(process \d+\); set ZERO_C_JOB or another MASTER_PORT|"
           r"rank 0 of job '.*' has another token; .* a second job needs another ZERO_C_JOB or MASTER_PORT",
    "two": r"cannot listen at 127\.0\.0\.1:\d+ \(.* in use\); rank 0 of another job has that port: choose a free one with ZERO_C_ADDR|"
           r"another job than the ranks that meet here; .* for each job another ZERO_C_ADDR or MASTER_PORT|"
           r"rank 0 has another token; .* a second job needs another ZERO_C_ADDR or MASTER_PORT",
}
MISSING = "missing: 1"


def take_part(hosts, differs, port, start_timeouts, at, folder):
    """The numbers of the jobs whose ranks are met, or what is said. `at`: when each process begins, by the clock of all; null: when
    those of the other jobs have left a file in `folder`.
    """
    place = int(os.environ["PLACE"])
    job, rank = divmod(place, RANKS)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "LOCAL_WORLD_SIZE": str(RANKS if hosts == "one" else 1), "ZERO_C_HOST": str(rank)}
    os.environ |= {name: value.format(job) for name, value in differs.items()}
    while len(os.listdir(folder)) < (JOBS - 1) * RANKS if at[place] is None else time.monotonic() < at[place]:
        time.sleep(0.0005)
    try:
        with zero_c.init(start_timeout=start_timeouts[job]) as comm:
            assert comm.backend == {"one": "shared memory", "two": "tcp"}[hosts]
            return "met", comm.all_gather(np.array([job])).ravel().tolist()
    except zero_c.CommError as error:
        return type(error).__name__, str(error)
    finally:
        _init.close_default()
        Path(folder, str(place)).touch()


@pytest.fixture(scope="module")
def group():
    with RankGroup(JOBS * RANKS, env=lambda rank: {**ALONE, "PLACE": rank}) as started:
        yield started


@pytest.fixture
def begin(group, tmp_path):
    """begin(hosts, differs, start_timeouts, delays_s): the answers of all jobs' ranks, a list for each job."""
    def run(hosts, differs, start_timeouts, delays_s):
        now = time.monotonic() + 0.05
        at = [None if delay_s is None else now + delay_s for delay_s in delays_s]
        answers = group.run(take_part, hosts, differs, free_port(), start_timeouts, at, str(tmp_path), deadline=2 * LATE_S)
        return [answers[job * RANKS:(job + 1) * RANKS] for job in range(JOBS)]

    return run


def moments(seed):
    """Nearly the same one for all."""
    draw = random.Random(seed)
    return [draw.choice([0, 0, 0.001, 0.01, 0.03]) for _ in range(JOBS * RANKS)]


def check(answers, hosts):
    """Each job is as it should be, or all its ranks have a sentence. How many met."""
    met = 0
    for job, of_ranks in enumerate(answers):
        if of_ranks[0][0] == "met" or of_ranks[1][0] == "met":
            assert of_ranks == [["met", [job] * RANKS]] * RANKS
            met += 1
            continue
        said = [text for _, text in of_ranks]
        assert any(re.search(TAKEN[hosts], text) for text in said), said
        assert all(re.search(TAKEN[hosts], text) or MISSING in text and kind == "Timeout" for kind, text in of_ranks), of_ranks
    return met


def turns(quick):
    return pytest.mark.parametrize("turns", [range(quick), pytest.param(range(quick, 8), marks=pytest.mark.long)], ids=["quick", "long"])


@turns(5)
@pytest.mark.parametrize("differs", NAMED)
def test_jobs_with_names_of_their_own_do_not_disturb_one_another(begin, differs, turns):
    for turn in turns:
        assert check(begin("one", NAMED[differs], [LATE_S] * JOBS, moments(turn)), "one") == JOBS


@turns(1)
@pytest.mark.parametrize(("hosts", "differs"), [("one", TOKENS), ("two", NAMED["run"]), ("two", TOKENS)], ids=["one token", "two run", "two token"])
def test_ranks_of_jobs_at_one_place_are_never_mixed(begin, hosts, differs, turns):
    for turn in turns:
        assert check(begin(hosts, differs, [IN_VAIN_S] * JOBS, moments(turn)), hosts) >= 1


@pytest.mark.parametrize(("hosts", "differs"), [("one", TOKENS), ("two", NAMED["run"])], ids=["one", "two"])
def test_who_has_the_place_is_said(begin, hosts, differs):
    # The first job's rank 1 comes when all others have been told, and they come when its rank 0 listens.
    answers = begin(hosts, differs, [LATE_S, 1, 1], [0, None] + [0.7] * (JOBS - 1) * RANKS)
    assert check(answers, hosts) == 1 and answers[0][0][0] == "met"
    assert all(kind == "CommError" for of_ranks in answers[1:] for kind, _ in of_ranks), answers


def test_launchers_on_two_hosts_with_one_address(tmp_path):
    (tmp_path / "script.py").write_text("import os, numpy, zero_c\n"
                                        f"comm = zero_c.init(start_timeout={IN_VAIN_S})\n"
                                        "print(comm.all_gather(numpy.array([int(os.environ['ZERO_C_TOKEN'])])).ravel().tolist())\n")
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    port = free_port()
    started = [[subprocess.Popen([sys.executable, "-m", "zero_c.launch", "-n", "1", "--hosts", "2", "--host-index", str(host), "--address",
                                  f"127.0.0.1:{port}", "script.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env={**clean, "PYTHONPATH": PACKAGE_ROOT, "ZERO_C_HOST": str(host), "ZERO_C_TOKEN": str(job)})
                for host in range(RANKS)] for job in range(2)]
    met = 0
    for job, launchers in enumerate(started):
        ended = [(*launcher.communicate(timeout=60), launcher.returncode) for launcher in launchers]
        if any(status == 0 for _, _, status in ended):
            assert [(output, status) for output, _, status in ended] == [(f"{[job] * RANKS}\n", 0)] * RANKS, ended
            met += 1
        else:
            assert any(re.search(TAKEN["two"], errors) for _, errors, _ in ended), ended
    assert met >= 1
