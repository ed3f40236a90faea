"""Builds zero_c._core from csrc/, and the CUDA plugin zero_c/_cuda.so from csrc/cuda/; everything else is in
pyproject.toml. Tests read the flags from here, and build the plugin with build_plugin.

ZERO_C_CUDA=0 builds no plugin, 1 fails where it cannot be built; auto, the default, builds it where nvcc is found.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Reproducible and without surprises for the host process: never -ffast-math.
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wall",
         "-Wextra"]

# One file per instruction set; a dispatcher picks at run time.
X86_FLAGS = {
    "cpu_kernels_avx2.c": ["-mavx2", "-mf16c", "-mbmi2"],
    "cpu_kernels_avx512.c": ["-mavx2", "-mf16c", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
}

# The plugin: what csrc/cuda needs of the core is compiled into it, too. It has its own zc_status.h, plugin_status.c.
PLUGIN_CORE = ["comm.c", "optim.c", "zc_dtype.c", "zc_status_common.c"]
PLUGIN_EXPORT = "zc_cuda_plugin_get"
CUDA_ARCHITECTURES = [("compute_80", "sm_80"), ("compute_90", "[sm_90,compute_90]")]
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "--threads", "2",
              *(f"-gencode=arch={arch},code={code}" for arch, code in CUDA_ARCHITECTURES),
              "-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-Wall,-Wextra"]
# For tests: warnings are errors, and so are spilled registers and local memory, which cost bandwidth in silence.
STRICT_FLAGS = ["-Werror"]
STRICT_NVCC_FLAGS = ["-Werror", "all-warnings", "-Xptxas", "-warn-spills,-warn-lmem-usage,-Werror"]
# libcuda and NCCL are looked for when a GPU is asked for, so that the plugin loads anywhere. Of libstdc++ it needs the
# two functions that nvcc's kernel handles are initialised with.
PLUGIN_LINK = ["-shared", "-cudart", "static", "-Xcompiler", "-static-libstdc++,-static-libgcc", "-Xlinker",
               "--as-needed,--exclude-libs,ALL,-z,defs,--version-script=exports.map"]


# ---- the CUDA plugin -------------------------------------------------------


def nvcc_places():
    """Where nvcc is looked for, in this order."""
    if os.environ.get("CUDA_HOME"):
        yield Path(os.environ["CUDA_HOME"], "bin", "nvcc")
    if shutil.which("nvcc"):
        yield Path(shutil.which("nvcc"))
    for packages in dict.fromkeys((sysconfig.get_path("platlib"), sysconfig.get_path("purelib"))):
        yield Path(packages, "nvidia", "cu13", "bin", "nvcc")


def find_nvcc():
    return next((place for place in nvcc_places() if os.access(place, os.X_OK)), None)


def command_output(command, cwd=None):
    """stdout and stderr of a command; CompileError with both if it fails."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          cwd=cwd, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise CompileError(f"{shlex.join(str(part) for part in command)}\n{done.stdout}")
    return done.stdout


def cuda_include_flags(nvcc):
    """Where the headers are that nvcc itself uses, as flags for the C compiler."""
    plan = command_output([nvcc, "--dryrun", "-c", Path("csrc", "cuda", "cuda_pack.cu"), "-o", os.devnull],
                          Path(__file__).parent)
    flags = [flag for line in re.findall(r"^#\$ INCLUDES=(.*)$", plan, re.MULTILINE) for flag in shlex.split(line)]
    folders = [flag.removeprefix("-I") for flag in flags]
    if not any(Path(folder, "cuda_runtime_api.h").exists() for folder in folders):
        raise CompileError(f"{nvcc} was found, but no cuda_runtime_api.h in {folders}; with the wheels of CUDA, "
                           "install nvidia-cuda-runtime of nvcc's version, too")
    return [part for folder in folders for part in ("-isystem", folder)]


def plugin_sources(root):
    folder = root / "csrc" / "cuda"
    return sorted(folder.glob("*.c")) + sorted(folder.glob("*.cu")) + [root / "csrc" / name for name in PLUGIN_CORE]


def made(target_stem, suffix, state, build):
    """The file that `build(path)` makes for this state of its inputs; made only when there is none."""
    target = target_stem.with_name(f"{target_stem.name}_{hashlib.sha256(state).hexdigest()[:24]}{suffix}")
    if not target.exists():
        part = target.with_name(f"{os.getpid()}.{target.name}")
        build(part)
        for old in target.parent.glob(f"{target_stem.name}_{'?' * 24}{suffix}"):
            old.unlink()
        part.replace(target)
    return target


def build_plugin(nvcc, folder, strict=False):
    """Builds the plugin in `folder` and returns its path; only what changed since the last time is compiled again."""
    root = Path(__file__).resolve().parent
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{root / 'csrc'}", f"-I{root / 'csrc' / 'cuda'}"]
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[:1]
    c_command = [*compiler, *FLAGS, "-fPIC", *(STRICT_FLAGS if strict else []), *includes,
                 *cuda_include_flags(nvcc), "-c"]
    cu_command = [nvcc, *NVCC_FLAGS, *(STRICT_NVCC_FLAGS if strict else []), *includes, "-c"]
    versions = command_output([nvcc, "--version"]) + command_output([*compiler, "--version"])
    headers = b"".join(path.read_bytes() for path in sorted((root / "csrc").rglob("*.h")) +
                       sorted((root / "csrc").rglob("*.cuh")))

    def compiled(source):
        command = cu_command if source.suffix == ".cu" else c_command
        state = repr((versions, [str(part) for part in command])).encode() + headers + source.read_bytes()
        return made(folder / source.stem, ".o", state, lambda part: command_output([*command, source, "-o", part]))

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, plugin_sources(root)))
    (folder / "exports.map").write_text(f"{{ global: {PLUGIN_EXPORT}; local: *; }};\n")
    command = [nvcc, *PLUGIN_LINK, *objects, "-ldl"]
    state = repr((versions, [str(part) for part in command], PLUGIN_EXPORT)).encode()
    return made(folder / "_cuda", ".so", state, lambda part: command_output([*command, "-o", part], folder))


def cuda_mode():
    mode = os.environ.get("ZERO_C_CUDA", "auto")
    if mode not in ("0", "1", "auto"):
        raise SystemExit(f"ZERO_C_CUDA is {mode!r}; legal are 0 (no CUDA plugin), 1 (must be built), auto")
    return mode


# ---- setuptools ------------------------------------------------------------


class BuildExt(build_ext):
    """setuptools' own, with flags that depend on the source file, and with the plugin, which is no Python module."""

    def build_extensions(self):
        compile_one = self.compiler._compile
        is_x86 = sysconfig.get_platform().endswith("x86_64")

        def compile_with_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            extra = X86_FLAGS.get(Path(src).name, []) if is_x86 else []
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *extra], pp_opts)

        self.compiler._compile = compile_with_flags
        super().build_extensions()

    def run(self):
        # A plugin of an earlier build would not fit this core.
        package = Path(self.get_finalized_command("build_py").get_package_dir("zero_c"))
        for place in (Path(self.build_lib, "zero_c"), *([package] if self.inplace else [])):
            (place / "_cuda.so").unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext):
        if ext.name != "zero_c._cuda":
            super().build_extension(ext)
            return
        nvcc = find_nvcc()
        if nvcc is None:
            home = os.environ.get("CUDA_HOME", "not set")
            raise CompileError(f"no nvcc of CUDA 13 in $CUDA_HOME/bin (CUDA_HOME: {home}), on PATH or in "
                               f"{list(nvcc_places())[-1].parent}; install one and set CUDA_HOME, or build without "
                               "CUDA (ZERO_C_CUDA=0)")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build_plugin(nvcc, Path("build", "plugin")), target)

    def get_ext_filename(self, fullname):
        if fullname.split(".")[-1] == "_cuda":
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)


def extensions():
    yield Extension(
        "zero_c._core",
        sources=sorted(str(path) for path in Path("csrc").glob("*.c")),
        depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
        include_dirs=["csrc", numpy.get_include()],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-lm", "-ldl"],
    )
    if cuda_mode() != "0":
        yield Extension("zero_c._cuda", sources=[str(path) for path in plugin_sources(Path())],
                        optional=cuda_mode() == "auto")


if __name__ == "__main__":
    setup(ext_modules=list(extensions()), cmdclass={"build_ext": BuildExt})
