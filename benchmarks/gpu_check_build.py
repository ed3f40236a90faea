"""Checks below Python's level: this machine, the build, mappings of memory, compute-sanitizer."""
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_check_child import Failed, Skip

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "csrc", "zero_c")
BUILT = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
COMPUTE_CAPABILITY = 75, 76     # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
ERROR_STATUS = 86               # for compute-sanitizer, so that it can be told from the program's own
OUR_KERNELS = re.compile(r"\b(fold_flags|pack|reduce|scale|squares|step_scalars|update)_kernel\b")
REPORT = re.compile(r"Invalid |Uninitialized |Misaligned |Out-of-range |Program hit ")


# ---- this machine -----------------------------------------------------------------


def gpus():
    """Names of the GPUs and the newest CUDA of the driver; Skip without any."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Skip("no GPU here: there is no driver (libcuda.so.1)") from None
    status = driver.cuInit(0)
    if status:
        raise Skip(f"no GPU here that can be used: cuInit gives error {status}")
    count, version, number = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    names = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(100)
        driver.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in COMPUTE_CAPABILITY:
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(str(number.value))
        names.append(f"{name.value.decode()} ({'.'.join(capability)})")
    if not names:
        raise Skip("no GPU here: the driver knows none")
    return names, f"{version.value // 1000}.{version.value % 1000 // 10}"


def torch_fault():
    """Why the checks with torch cannot be made, or None; torch's version."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}", "no torch"
    text = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
    return (None if torch.cuda.is_available() else f"{text} has no GPU"), text


def machine(folder, package):
    """Says what the machine lacks as a figure: {"gpu": why there is none, or None, "torch": the same}."""
    python = f"Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores"
    try:
        names, driver = gpus()
    except Skip as none:
        return f"{none}; {python}", {"lacks": {"gpu": str(none), "torch": None}}
    fault, torch = torch_fault()
    version = nccl_version()
    nccl = "no NCCL" if version is None else f"NCCL {'.'.join(map(str, version))}"
    found = f"{len(names)} x {names[0]}, driver for CUDA {driver}; {python}, {torch}, {nccl}"
    return found, {"lacks": {"gpu": None, "torch": fault}}


def nccl_version():
    """Of the library that zero_c takes: the process's, the wheel's or the loader's; None without any."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    wheel = [str(Path(folder, "lib", "libnccl.so.2")) for folder in (spec.submodule_search_locations if spec else [])]
    for path in [*wheel, "libnccl.so.2"]:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        version = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(version)) == 0:
            return version.value // 10000, version.value // 100 % 100, version.value % 100
    return None


# ---- the build --------------------------------------------------------------------


def output_of(command, **options):
    """What a command printed; Failed with the end of it if it fails."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          stdin=subprocess.DEVNULL, **options)
    if done.returncode:
        print(done.stdout)
        started = " ".join(map(str, command[1:4]))
        raise Failed(f"{Path(command[0]).name} {started} ... ended with status {done.returncode}")
    return done.stdout


def copy_sources(folder):
    """The clone without what was built in it, so that the build neither takes nor leaves anything there."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=BUILT)
        elif (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def build(folder, package):
    for needed in ("setuptools", "numpy"):
        if importlib.util.find_spec(needed) is None:
            raise Skip(f"{needed}, which a build needs, is not installed")
    source = Path(folder, "source")
    copy_sources(source)
    nvcc = runpy.run_path(str(source / "setup.py"), run_name="flags")["find_nvcc"]()
    environment = {**os.environ, "ZERO_C_CUDA": "1" if nvcc else "0"}
    if importlib.util.find_spec("pip") is not None:
        command = ["-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index", "--target", package,
                   "."]
    else:
        command = ["setup.py", "-q", "build", "--build-lib", package]
    print(output_of([sys.executable, *command], cwd=source, env=environment))
    importlib.invalidate_caches()       # the folder is on the path already, and did not exist so far
    import zero_c
    from zero_c import _gpu

    if not Path(zero_c.__file__).is_relative_to(package):
        raise Failed(f"import zero_c finds {zero_c.__file__}, not what was built")
    versions = f"zero_c {zero_c.__version__}, numpy {importlib.metadata.version('numpy')}"
    if nvcc is None:
        return f"{versions}; without a part for GPUs, because there is no nvcc of CUDA 13", {"plugin": False}
    if not _gpu.PLUGIN.exists():
        raise Failed("nvcc was found, the build has succeeded, and there is no _cuda.so")
    try:
        usable = f"{_gpu.probe()} GPUs can be used"
    except zero_c.Error as error:
        usable = str(error)
    release = re.search(r"release (\S+?),", output_of([nvcc, "--version"]))
    made = f"_cuda.so of {_gpu.PLUGIN.stat().st_size / 2**20:.1f} MiB by nvcc {release[1] if release else '?'}"
    return f"{versions}; {made}; {usable}", {"plugin": True}


# ---- mappings ---------------------------------------------------------------------


def compile_alias(folder):
    """gpu_alias.c with the core's loader of the plugin, by the compiler alone."""
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        raise Skip(f"no C compiler ({compiler})")
    program = Path(folder, "gpu_alias")
    core = [ROOT / "csrc" / name for name in ("cuda_load.c", "zc_status.c")]
    output_of([compiler, "-std=gnu11", "-O2", "-pthread", f"-I{ROOT / 'csrc'}", "-o", program, HERE / "gpu_alias.c",
               *core, "-ldl"])
    return program


def aliases(folder, package, rounds=100000):
    done = subprocess.run([compile_alias(folder), Path(package, "zero_c", "_cuda.so"), str(rounds)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Failed(done.stdout.strip() or f"gpu_alias ended with status {done.returncode}")
    return done.stdout.strip()


# ---- compute-sanitizer --------------------------------------------------------------


def sanitizer():
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if nvcc := shutil.which("nvcc"):
        homes.append(Path(nvcc).resolve().parent.parent)
    homes += [Path(path) for path in sorted(Path("/usr/local").glob("cuda*"), reverse=True)]
    places = [place for home in homes for place in (home / "bin" / "compute-sanitizer",
                                                    home / "compute-sanitizer" / "compute-sanitizer")]
    on_path = shutil.which("compute-sanitizer")
    found = on_path or next((str(place) for place in places if os.access(place, os.X_OK)), None)
    if found is None:
        raise Skip("no compute-sanitizer on PATH, in CUDA_HOME or beside nvcc")
    return found


def reports(text):
    """Errors in what compute-sanitizer printed, as (what it is, where: a line that begins with the kernel's name)."""
    lines = [line.lstrip("=").strip() for line in text.splitlines() if line.startswith("=====")]
    return [(line, where.removeprefix("at ")) for line, where in zip(lines, [*lines[1:], ""]) if REPORT.match(line)]


def is_ours(where):
    """torch has kernels of some of the names, too."""
    return bool(OUR_KERNELS.search(where)) and "at::native" not in where


def sanitize(tool, path, *runs):
    """What was found in runs, each (name, command), under compute-sanitizer; Failed with an error in our kernels."""
    said = []
    for name, command in runs:
        done = subprocess.run([path, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), "--report-api-errors", "no",
                               *map(str, command)], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        print(done.stdout)
        found = reports(done.stdout)
        ours = [f"{what} at {where}" for what, where in found if is_ours(where)]
        if ours:
            raise Failed(f"{name}: {len(ours)} errors in this package's kernels, the first: {ours[0]}")
        if done.returncode and not (done.returncode == ERROR_STATUS and found):
            raise Failed(f"{name}: the program ended with status {done.returncode}")
        said.append(f"{name} clean" + (f" but for {len(found)} in others' kernels" if found else ""))
    return ", ".join(said)


def memcheck(folder, package):
    path, tiny = sanitizer(), [sys.executable, HERE / "gpu_check_tiny.py"]
    mappings = [compile_alias(folder), Path(package, "zero_c", "_cuda.so"), "200"]
    return sanitize("memcheck", path, ("mappings", mappings), ("arrays", tiny), ("stage 3", [*tiny, "3"]))


def initcheck(folder, package):
    """Without mappings: what was written through one counts as never written at the others."""
    return sanitize("initcheck", sanitizer(), ("arrays", [sys.executable, HERE / "gpu_check_tiny.py"]))
