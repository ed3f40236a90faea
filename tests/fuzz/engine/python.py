"""Runs a target in Python, with the options of engine/driver.c: engine/mutate.c makes the inputs, or with --guided atheris.

    python tests/fuzz/engine/python.py [--guided] TARGET [-runs=N] [-seed=K] [-max_total_time=SECONDS] [-max_len=BYTES]
                                                         [-timeout=SECONDS] [-artifact_prefix=PATH] INPUT|FOLDER...

A target is a module with one_input(data), which returns for every string of bytes; what it raises is a finding, and
so is memory out of proportion and an input that takes longer than the timeout. Where mutate.c makes the inputs, the one
that is running lies in the file PATHcurrent, as driver.c has it.
"""

import ctypes
import faulthandler
import importlib
import os
import resource
import struct
import sys
import time
from pathlib import Path

FUZZ = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(FUZZ), str(FUZZ.parent)]
MEMORY_BYTES = 1 << 30  # beyond what the target has at its start


def options_of(arguments):
    given = {"-runs": 0, "-seed": 1, "-max_total_time": 0.0, "-max_len": 1024, "-timeout": 20, "-artifact_prefix": ""}
    paths = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            paths.append(Path(argument))
        elif name in given:
            given[name] = type(given[name])(value)
        else:
            sys.exit(f"unknown option {argument}")
    return given, paths


def limit_memory():
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))


def run(module, options, paths):
    """All inputs as they are, then mutations of them unless only files were named."""
    from build import mutator
    library = ctypes.CDLL(mutator())
    library.fuzz_random.restype = ctypes.c_uint64
    library.fuzz_mutate.restype = ctypes.c_size_t
    library.fuzz_mutate.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    current = os.open(f"{options['-artifact_prefix']}current", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    mutated = any(path.is_dir() for path in paths)
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    inputs = [file.read_bytes() for file in files] or [b""]
    room = max(options["-max_len"], *map(len, inputs))
    end = time.monotonic() + options["-max_total_time"] if options["-max_total_time"] else None
    state, memory, count = ctypes.c_uint64(options["-seed"]), ctypes.create_string_buffer(room), 0
    limit_memory()

    def one(data):
        os.pwrite(current, struct.pack("<QQ", count + 1, len(data)) + data, 0)
        faulthandler.dump_traceback_later(options["-timeout"], exit=True)
        module.one_input(data)
        faulthandler.cancel_dump_traceback_later()

    for data in inputs:
        one(data)
        count += 1
    while mutated and (not options["-runs"] or count < options["-runs"]) and (end is None or time.monotonic() < end):
        first, other = (inputs[library.fuzz_random(ctypes.byref(state)) % len(inputs)] for _ in range(2))
        memory[:len(first)] = first
        size = library.fuzz_mutate(ctypes.byref(state), memory, len(first), room, other, len(other))
        one(memory[:size])
        count += 1
    print(f"{count} inputs", file=sys.stderr)


def main():
    if sys.argv[1] != "--guided":
        name, *arguments = sys.argv[1:]
        run(importlib.import_module(name), *options_of(arguments))
        return
    import atheris
    name, *arguments = sys.argv[2:]
    with atheris.instrument_imports(include=["zero_c"]):
        module = importlib.import_module(name)
    atheris.Setup([sys.argv[0], *arguments], module.one_input)
    limit_memory()
    atheris.Fuzz()


if __name__ == "__main__":
    main()
