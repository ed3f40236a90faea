"""gcc -fanalyzer and clang-tidy over csrc/*.c: `make analyze`. Fails on any finding that is not explained below.

    python tests/analyze.py

What clang-tidy looks for is in .clang-tidy.
"""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
PYTHON_HEADERS = ["-isystem", sysconfig.get_paths()["include"], "-isystem", numpy.get_include()]

# What gcc 12 gets wrong: (file, function, warning) and why it cannot happen. It looks into no other file, so it
# takes it that any function may return ZC_OK.
EXPLAINED = {
    ("mem_channel.c", "region_alloc", "-Wanalyzer-null-dereference"): "mem_vote_all returns no ZC_OK after a failed status",
    ("cuda_load.c", "load", "-Wanalyzer-null-argument"): "zc_fail returns the status that it is given, never ZC_OK",
    ("shm_comm.c", "shm_comm_open", "-Wanalyzer-null-dereference"): "zc_fail returns the status that it is given, never ZC_OK",
    ("hub_server.c", "keep", "-Wanalyzer-null-argument"): "text is NULL only where header->bytes is 0",
    ("shm_packet.c", "shm_packet_send", "-Wanalyzer-null-dereference"): "there is room for one header when count is not 0",
}
# clang 14 knows no "f16c" in __builtin_cpu_supports and stops there.
NOT_FOR_CLANG = {"cpu_dispatch.c"}


def flags_for(source):
    isa = SETUP["X86_FLAGS"].get(source.name, []) if platform.machine() == "x86_64" else []
    return ["-std=gnu11", "-Wall", "-Wextra", f"-I{CSRC}", *PYTHON_HEADERS, *isa]


def run(command):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "LC_ALL": "C"})


def gcc(source):
    """Findings as (file, function, warning), and all that gcc says."""
    # -O1: what is inlined more gives the analyzer longer paths, and more that cannot happen.
    done = run(["gcc", "-O1", "-fanalyzer", *flags_for(source), "-c", source, "-o", os.devnull])
    found, function = set(), ""
    for line in done.stderr.splitlines():
        if inside := re.search(r"In function '(\w+)':", line):
            function = inside[1]
        elif warning := re.search(r"\[(-W[\w-]+)\]$", line):
            found.add((source.name, function, warning[1]))
    if done.returncode:
        found.add((source.name, "", "does not compile"))
    return found, done.stderr


def clang_tidy(source):
    done = run(["clang-tidy", "--quiet", source, "--", *flags_for(source)])
    return ({(source.name, "", "clang-tidy")} if done.returncode else set()), done.stdout


def findings(tool, sources):
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(tool, sources))
    found = set().union(*(result[0] for result in results))
    for these, text in results:
        if these - set(EXPLAINED):
            print(text)
    return found


def main():
    sources, wrong = sorted(CSRC.glob("*.c")), 0
    if shutil.which("gcc"):
        found = findings(gcc, sources)
        new, stale = found - set(EXPLAINED), set(EXPLAINED) - found
        for name in sorted(stale):
            print(f"explained, but not found any more: {name}; take it out of EXPLAINED")
        print(f"gcc -fanalyzer: {len(sources)} files, {len(new)} findings, {len(found) - len(new)} explained")
        wrong += len(new) + len(stale)
    else:
        print("gcc is not installed: -fanalyzer was left out")
    if shutil.which("clang-tidy"):
        chosen = [source for source in sources if source.name not in NOT_FOR_CLANG]
        found = findings(clang_tidy, chosen)
        print(f"clang-tidy: {len(chosen)} files, {len(found)} with findings")
        wrong += len(found)
    else:
        print("clang-tidy is not installed (Debian: apt-get install clang-tidy): it was left out")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
