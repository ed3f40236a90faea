"""The backend's own declarations of NCCL (csrc/cuda/nccl_api.h) against NVIDIA's header, and against the emulated NCCL:
functions, numbers, layouts.

NVIDIA's is looked for in NCCL_HOME and in the nvidia-nccl wheel; the wheel has 200 MB, so it is not among the
requirements of tests.
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from cuda_build import CC, CSRC, CUDA, EMULATION, include_flags, needs_headers

OURS = CUDA / "nccl_api.h"
EMULATED = EMULATION / "emu_nccl.h"
DEADLINE_S = 60

pytestmark = needs_headers


def nccl_header():
    """nccl.h, or None."""
    folders = [Path(os.environ["NCCL_HOME"])] if os.environ.get("NCCL_HOME") else []
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    folders += [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((folder / "include" / "nccl.h" for folder in folders if (folder / "include" / "nccl.h").exists()), None)


THEIRS = nccl_header()
needs_nccl = pytest.mark.skipif(THEIRS is None, reason="no nccl.h (pip install --no-deps 'nvidia-nccl-cu13>=2.28', or "
                                                       "NCCL_HOME)")


def compiler(*arguments):
    command = [CC, "-std=gnu11", *include_flags(), f"-I{CUDA}", f"-I{CSRC}", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=DEADLINE_S,
                          stdin=subprocess.DEVNULL)


def output_of(program, header, folder):
    """What a C program prints that includes the header."""
    source, binary = folder / "facts.c", folder / "facts"
    source.write_text(f'#include "{header}"\n#include <stddef.h>\n#include <stdio.h>\n{program}')
    made = compiler(source, "-o", binary)
    assert made.returncode == 0, made.stderr
    return subprocess.run([binary], capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout.splitlines()


def layouts(declarations):
    """A C program that prints every number and layout that these declarations have."""
    numbers = re.findall(r"\b(nccl\w+) = \d+", declarations)
    fields = re.findall(r"\b(\w+)[,;]", re.search(r"struct ncclConfig_t \{(.*?)\}", declarations, re.DOTALL)[1])
    assert len(numbers) >= 12 and len(fields) >= 17
    lines = [f'printf("{name} is %d\\n", (int){name});' for name in numbers]
    lines += [f'printf("{name}: %zu bytes at %zu\\n", sizeof(((ncclConfig_t *)0)->{name}), '
              f"offsetof(ncclConfig_t, {name}));" for name in fields]
    lines += [f'printf("{name} has %zu bytes\\n", sizeof({name}));'
              for name in ("ncclUniqueId", "ncclResult_t", "ncclRedOp_t", "ncclDataType_t", "ncclComm_t")]
    return "int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"


def prototypes(folder, ours):
    """C that does not compile where the header before it declares other functions."""
    macros = compiler("-E", "-dM", "-x", "c", ours).stdout
    table = re.search(r"^#define NCCL_MAP\(X\) .*$", macros, re.MULTILINE)[0]
    texts = re.findall(r"const char \*\(\*(\w+)\)(\(.*\));", ours.read_text())
    assert table.count(" X(") >= 15 and len(texts) == 2
    check = ('_Static_assert(__builtin_types_compatible_p(__typeof__(nccl##name), result arguments), '
             '"nccl" #name " is declared in another way");')
    return "\n".join([table, f"#define CHECK(result, name, arguments) {check}",
                      "#define X(name, arguments) CHECK(ncclResult_t, name, arguments)", "NCCL_MAP(X)",
                      *[f"CHECK(const char *, {name}, {arguments})" for name, arguments in texts], ""])


def differences(ours, theirs, folder):
    """Lines about what one header declares in another way than the other."""
    program = layouts(ours.read_text())
    here, there = output_of(program, ours, folder), output_of(program, theirs, folder)
    found = [f"{line} here, {other} there" for line, other in zip(here, there, strict=True) if line != other]
    source = folder / "prototypes.c"
    source.write_text(f'#include "{theirs}"\n' + prototypes(folder, ours))
    made = compiler("-fsyntax-only", source)
    found += re.findall(r'"(nccl\w+ is declared in another way)"', made.stderr)
    assert made.returncode == 0 or found, made.stderr
    return found


@needs_nccl
def test_declarations_are_nvidias(tmp_path):
    assert differences(OURS, THEIRS, tmp_path) == []


@needs_nccl
def test_configurations_are_nvidias(tmp_path):
    """Ours says that it is of version 2.28: of a later header it is the beginning."""
    ours = output_of('int main(void)\n{\nprintf("%x %d %zu\\n", NCCL_CONFIG_MAGIC, NCCL_UNSET, sizeof(ncclConfig_t));\n}',
                     OURS, tmp_path)[0].split()
    theirs = output_of('int main(void)\n{\nncclConfig_t config = NCCL_CONFIG_INITIALIZER;\n'
                       'printf("%x %d %zu %d\\n", config.magic, config.blocking, config.size, NCCL_VERSION_CODE);\n}',
                       THEIRS, tmp_path)[0].split()
    assert ours[:2] == theirs[:2]
    version = int(theirs[3]) // 100
    assert version >= 228
    assert int(ours[2]) == int(theirs[2]) if version == 228 else int(ours[2]) <= int(theirs[2])


def test_declarations_are_the_emulations(tmp_path):
    assert differences(OURS, EMULATED, tmp_path) == []


@pytest.mark.parametrize(("old", "new", "words"), [
    ("ncclUint64 = 5", "ncclUint64 = 4", "ncclUint64 is 4 here, ncclUint64 is 5 there"),
    ("int splitShare, trafficClass;", "int trafficClass, splitShare;", "trafficClass: 4 bytes at "),
    ("char internal[128];", "char internal[64];", "ncclUniqueId has 64 bytes here"),
    ("int root, ncclComm_t comm", "ncclComm_t comm, int root", "ncclBroadcast is declared in another way"),
    ("(*GetLastError)(ncclComm_t comm)", "(*GetLastError)(void)", "ncclGetLastError is declared in another way"),
])
def test_differences_are_found(tmp_path, old, new, words):
    text = OURS.read_text()
    assert text.count(old) == 1
    changed = tmp_path / "nccl_api.h"
    changed.write_text(text.replace(old, new))
    assert any(words in line for line in differences(changed, EMULATED, tmp_path))
