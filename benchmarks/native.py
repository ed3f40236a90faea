"""Compiles the C benchmarks against the core's own sources, with the flags that the package is built with."""
import json
import os
import pathlib
import platform
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
CORE = HERE.parent / "csrc"
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread", f"-I{CORE}",
         f"-I{HERE}"]
AVX2 = ["-mavx2", "-mf16c", "-mbmi2"]
AVX512 = AVX2 + ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]


def build(folder):
    """Objects of the core without the Python files, then one program per benchmark; their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "gcc")
    x86 = platform.machine() in ("x86_64", "AMD64")
    objects = []
    for source in sorted(CORE.glob("*.c")):
        if source.name.startswith("py_"):
            continue
        wide = {"cpu_kernels_avx2": AVX2, "cpu_kernels_avx512": AVX512}.get(source.stem, []) if x86 else []
        objects.append(str(folder / f"{source.stem}.o"))
        subprocess.run([compiler, *FLAGS, *wide, "-c", str(source), "-o", objects[-1]], check=True)
    for source in sorted(HERE.glob("*.c")):
        subprocess.run([compiler, *FLAGS, "-o", str(folder / source.stem), str(source), *objects, "-lm"], check=True)
    return folder


def run(folder, program, argument, cores, timeout):
    """The JSON that one program printed; a text that says what went wrong otherwise."""
    try:
        done = subprocess.run([str(folder / program), str(argument)], capture_output=True, text=True, timeout=timeout,
                              preexec_fn=lambda: os.sched_setaffinity(0, cores))
    except subprocess.TimeoutExpired:
        return f"{program} did not end within {timeout:.0f} s"
    return json.loads(done.stdout) if done.returncode == 0 else f"{program}: {done.stderr.strip()[-500:]}"
