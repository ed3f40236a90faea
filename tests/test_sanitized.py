"""The Python suite's core, run once more with the extension under the address and undefined behaviour sanitizers.

A test of the suite passes here as it does without them, in its ranks too, which inherit the environment; what a sanitizer finds
ends the process that did it. The thread sanitizer is for the C programs: in Python it would watch an interpreter that was not built
for it.
"""

import os
import re
import sys
from pathlib import Path

import package_build
import pytest
from test_c import run

TESTS = Path(__file__).resolve().parent
DEADLINE_S = 1200
# File -> the part of it that takes seconds; "": none.
CORE = {}


def run_suite(*arguments):
    folder, environment = package_build.sanitized()
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(TESTS.parent), *arguments], DEADLINE_S,
               {**environment, "PYTHONPATH": path})


def test_the_extension_is_the_sanitized_one(tmp_path):
    """Or all else here would show nothing: it ends a process that reads beyond an array."""
    script = tmp_path / "test_found.py"
    script.write_text("import ctypes, zero_c._core\n\n\ndef test_beyond_the_end():\n"
                      "    library = ctypes.CDLL(zero_c._core.__file__)\n    assert hasattr(library, '__asan_init')\n"
                      "    ctypes.string_at(ctypes.create_string_buffer(8), 4096)\n")
    status, output = run_suite(str(script))
    assert status != 0 and "AddressSanitizer: heap-buffer-overflow" in output, output


@pytest.mark.parametrize("name", [name for name, part in CORE.items() if part])
def test_in_seconds(name):
    status, output = run_suite(str(TESTS / f"{name}.py"), "-k", CORE[name])
    assert status == 0 and re.search(r"\d+ passed", output), output


@pytest.mark.long
@pytest.mark.parametrize("name", CORE)
def test_whole_files(name):
    status, output = run_suite(str(TESTS / f"{name}.py"))
    assert status == 0 and re.search(r"\d+ passed", output), output
