"""Runs spin over the models of this folder: what must hold holds, and each seeded fault is found.

    python check.py [--quick]

A case is a model with its defines.  A search must be complete (neither depth nor memory ran out) to
count as "holds"; a fault must be found in the way that the table names.  What the models say
is in README.md.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MEMORY_MIB = 2000  # of one search; two run at a time
DEPTH_STEPS = 1_000_000
DEADLINE_S = 280

HOLDS, STUCK, ASSERTION = "holds", "invalid end state", "assertion violated"


@dataclass(frozen=True)
class Case:
    model: str
    defines: str
    found: str = HOLDS
    quick: bool = False  # also in the test suite
    liveness: bool = False

    @property
    def name(self):
        return f"{self.model} {self.defines}".strip()


# The long ones first: two run at a time.
CASES = [
    Case("operations", "N=3 OPS=1 DEATH"),
    Case("operations", "N=3 OPS=1 WORK=STAGING DEATH DEADLINE"),
    Case("operations", "N=3 OPS=2"),
    Case("operations", "N=3 OPS=2 WORK=EXCHANGE"),
    Case("operations", "N=3 OPS=3 WORK=STAGING"),
    Case("operations", "N=3 OPS=1 DEADLINE"),
    Case("operations", "N=3 OPS=2 WORK=STAGING LEAVE"),
    *(Case("operations", f"OPS=3 WORK={work}{ends}", quick=work == "REGION" and not ends)
      for work in ("REGION", "EXCHANGE", "STAGING") for ends in ("", " DEATH", " DEADLINE", " DEATH DEADLINE", " LEAVE")),
    Case("operations", "TAGS=2 OPS=2"),
    Case("operations", "TAGS=2 OPS=1 DEATH DEADLINE"),
    Case("cycles", ""),
    Case("cycles", "DIVERGED", liveness=True),
    Case("order", "", quick=True),
    Case("blocks", "N=2"),
    Case("blocks", "N=3"),
    # Seeded faults.
    Case("operations", "FAULT_STAMP_BEFORE_DATA", ASSERTION),
    Case("operations", "FAULT_DONE_BEFORE_READ", ASSERTION),
    Case("operations", "FAULT_REUSE_WITHOUT_READERS", ASSERTION, quick=True),
    Case("operations", "N=3 FAULT_REUSE_AFTER_FIRST_READER", ASSERTION),
    Case("operations", "WORK=EXCHANGE FAULT_SLOT_STILL_READ", ASSERTION),
    Case("operations", "WORK=STAGING OPS=3 FAULT_ONE_DESCRIPTOR", ASSERTION),
    Case("operations", "WORK=STAGING OPS=3 FAULT_ONE_HALF", ASSERTION),
    Case("operations", "FAULT_SLEEP_WITHOUT_LOOK", STUCK, quick=True),
    Case("operations", "FAULT_LOOK_BEFORE_SLEEPING", STUCK),
    Case("operations", "FAULT_DOORBELL_READ_LATE", STUCK),
    Case("operations", "FAULT_WAKE_WITHOUT_BELL", STUCK),
    Case("operations", "FAULT_DONE_WITHOUT_WAKE", STUCK),
    Case("operations", "TAGS=2 FAULT_PROGRESS_OF_ONE", STUCK),
    Case("operations", "DEATH FAULT_LOSSES_BEFORE_SLEEP_ONLY", STUCK),
    Case("operations", "LEAVE FAULT_LOSS_WITHOUT_ANOTHER_LOOK", ASSERTION),
    Case("operations", "DEADLINE FAULT_ALARM_WITHOUT_WAKE", STUCK),
    Case("operations", "DEADLINE FAULT_ALARM_BEFORE_REASON", ASSERTION),
    Case("operations", "N=3 OPS=1 WORK=STAGING DEATH DEADLINE FAULT_NO_RELAY", STUCK),
    Case("cycles", "FAULT_ONE_PASS", ASSERTION),
    Case("cycles", "FAULT_ANY_SEQUENCE", ASSERTION),
    Case("cycles", "FAULT_ONE_BEAT", ASSERTION),
    Case("blocks", "FAULT_COUNT_WHEN_UNSURE", ASSERTION),
    Case("blocks", "FAULT_FREE_WHEN_UNSURE", ASSERTION),
    Case("blocks", "FAULT_FREE_WITHOUT_COUNT", ASSERTION),
    Case("order", "POSTED_ORDER=RELEASE", STUCK, quick=True),
    Case("order", "SLEEPING_ORDER=RELEASE", STUCK, quick=True),
    Case("order", "POSTED_ORDER=RELAXED", ASSERTION, quick=True),
]


@dataclass(frozen=True)
class Outcome:
    found: str  # HOLDS, STUCK, ASSERTION, or what kept the search from an answer
    states: int
    seconds: float  # of the search alone
    memory_mib: float


def build(case, folder):
    """The searcher that spin makes of a model."""
    spin = ["spin", "-a", *(f"-D{define}" for define in case.defines.split()), HERE / f"{case.model}.pml"]
    kind = [] if case.liveness else ["-DNOFAIR"] if case.model == "cycles" else ["-DSAFETY", "-DNOFAIR"]
    level = "-O2" if case.found == HOLDS and not case.quick else "-O0"
    gcc = ["gcc", "-w", level, "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}", *kind, "-o", "pan", "pan.c"]
    for command in (spin, gcc):
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"{case.name}: {command[0]} failed:\n{made.stdout}{made.stderr}")


def search(case):
    """What spin finds."""
    with tempfile.TemporaryDirectory(prefix="zero_c_model_") as folder:
        build(case, folder)
        options = ["-a", "-f"] if case.liveness else ["-a"] if case.model == "cycles" else []
        start = time.monotonic()
        try:
            output = subprocess.run(["./pan", *options, f"-m{DEPTH_STEPS}", "-c1"], cwd=folder, capture_output=True,
                                    text=True, timeout=DEADLINE_S).stdout
        except subprocess.TimeoutExpired:
            return Outcome(f"no answer after {DEADLINE_S} s", 0, DEADLINE_S, 0)
        seconds = time.monotonic() - start
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d\S*) states, stored", output)
    memory = re.search(r"([\d.]+)\s+total actual memory usage", output)
    complete = not re.search(r"not completed|too small|out of memory|reached -D", output)
    if not errors or not states:
        found = f"no result:\n{output}"
    elif int(errors[1]):
        found = next((kind for kind in (STUCK, ASSERTION) if f"pan:1: {kind}" in output), f"something else:\n{output}")
    else:
        found = HOLDS if complete else f"an incomplete search:\n{output}"
    return Outcome(found, int(float(states[1])) if states else 0, seconds, float(memory[1]) if memory else 0)


def main(arguments):
    if not shutil.which("spin"):
        print("spin is not installed (Debian: apt-get install spin); gcc is needed too")
        return 2
    cases = [case for case in CASES if case.quick or "--quick" not in arguments]
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        for case, outcome in zip(cases, pool.map(search, cases)):
            right = outcome.found == case.found
            wrong += not right
            print(f"{'ok   ' if right else 'WRONG'} {case.name}: {outcome.found} "
                  f"({outcome.states} states, {outcome.seconds:.1f} s, {outcome.memory_mib:.0f} MiB)"
                  + ("" if right else f"; must be: {case.found}"), flush=True)
    print(f"{len(cases)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
