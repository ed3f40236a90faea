"""zero_c with another build of its extension, for tests: a folder for PYTHONPATH whose package links all else from this one."""

import functools
import subprocess
import sysconfig

import numpy

from test_c import BUILD, CC, CSRC, FLAVOURS, ROOT, compile_all, compile_object, core_objects, flags_for, link


def make_package(folder, compile_source, core, flags=()):
    """The folder, made in `folder`. compile_source(source, *more): the object of a source; `core`: those of the core."""
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
    glue = compile_all(lambda source: compile_source(source, *includes), sorted(CSRC.glob("py_*.c")))
    extension = link(folder / "_core.so", [CC, "-shared", "-pthread", *flags], [*glue, *core, "-lm", "-ldl"])
    package = folder / "package" / "zero_c"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / "zero_c").iterdir() if path.suffix != ".so" and path.name != "__pycache__"}
    wanted["_core.so"] = extension
    for entry in package.iterdir():
        if entry.is_symlink() and (entry.name not in wanted or entry.resolve() != wanted[entry.name].resolve()):
            entry.unlink()
    for name, path in wanted.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(path)
    return package.parent


@functools.cache
def sanitized():
    """The package under the address and undefined behaviour sanitizers, and what else it wants in the environment."""
    headers = set(CSRC.rglob("*.h"))

    def compile_source(source, *more):
        return compile_object(source, BUILD / "address", [CC, *flags_for(source, "address"), *more], headers)

    folder = make_package(BUILD / "address", compile_source, core_objects("address"), FLAVOURS["address"])
    library = subprocess.run([CC, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    # Python itself leaves memory to the end of the process; and only what malloc has given is watched.
    return folder, {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
