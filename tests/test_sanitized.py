"""The Python suite's core once more, with the extension under the address and undefined behaviour sanitizers.

A test of the suite passes here as it does without them, in its ranks too, which inherit the environment; what a sanitizer finds
ends the process that did it. The thread sanitizer is for C programs: in Python it would watch an interpreter that was not
built for it.
"""

import os
import re
import sys
from pathlib import Path

import package_build
import pytest
from test_c import run

TESTS = Path(__file__).resolve().parent
DEADLINE_S = 1500
# What takes seconds, of the first files of the next list: -k's words. Importing torch takes long under a sanitizer.
SECONDS = ("(test_dlpack and not torch and not outlive and not another_thread) or (test_divergence and stage_3 and step) or 2-float16"
           " or (test_numpy_api and not torch and not formula and not that_differ and not writes_between)")
# Files of which nearly all runs without torch; what they do with it runs too.
CORE = ("test_dlpack", "test_numpy_api", "test_divergence", "test_equivalence", "test_checkpoint", "test_init_launch", "test_jobs", "test_hosts",
        "test_meeting", "test_memory_traffic", "test_restart", "test_silence")


def run_suite(*arguments):
    folder, environment = package_build.sanitized()
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    program = Path(pytest.__file__).with_name("__main__.py")  # with -m, this folder would come before the path
    return run([sys.executable, str(program), "-q", "-p", "no:cacheprovider", "--rootdir", str(TESTS.parent), *arguments], DEADLINE_S,
               {**environment, "PYTHONPATH": path})


def check_suite(names, *arguments):
    status, output = run_suite(*(str(TESTS / f"{name}.py") for name in names), *arguments)
    assert status == 0 and re.search(r"\d+ passed", output), output


def test_what_a_sanitizer_finds_is_shown(tmp_path):
    """Or all else here would show nothing: the extension is the sanitized one, and a read beyond an array ends the process."""
    (tmp_path / "test_beyond.py").write_text("import ctypes, zero_c._core\n\n\ndef test_beyond_the_end():\n"
                                             "    assert hasattr(ctypes.CDLL(zero_c._core.__file__), '__asan_init')\n"
                                             "    ctypes.string_at(ctypes.create_string_buffer(8), 4096)\n")
    status, output = run_suite("-s", str(tmp_path / "test_beyond.py"))
    assert status != 0 and "AddressSanitizer: heap-buffer-overflow" in output, output


def test_what_takes_seconds():
    check_suite(CORE[:4], "-k", SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("name", CORE)
def test_whole_files(name):
    check_suite([name])
