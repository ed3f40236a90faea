"""The process of one check: python gpu_check_child.py MODULE:FUNCTION RESULT ARGUMENTS

Calls function(**ARGUMENTS) and writes the verdict to the file RESULT. The function returns what it found, a sentence or
(sentence, figures); Skip and Failed are the other two verdicts. Anything else that it raises ends the process as usual.
"""
import ctypes
import faulthandler
import importlib
import json
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Skip(Exception):
    """The check cannot be made here; why."""


class Failed(Exception):
    """What was found instead of what should be."""


def verdict_of(function, arguments):
    numbers = {}
    try:
        found, verdict = function(**arguments), "ok"
    except (Skip, Failed) as other:
        found, verdict = str(other), "skip" if isinstance(other, Skip) else "FAIL"
    if not isinstance(found, str):
        found, numbers = found
    return {"verdict": verdict, "found": found, "numbers": numbers}


def main(target, result, arguments):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    module, function = target.split(":")
    report = verdict_of(getattr(importlib.import_module(module), function), json.loads(arguments))
    Path(f"{result}.part").write_text(json.dumps(report))
    Path(f"{result}.part").replace(result)      # whole or not at all


if __name__ == "__main__":
    # By its own name, so that Skip and Failed are the classes that the checks import.
    importlib.import_module("gpu_check_child").main(*sys.argv[1:])
