"""Builds zero_c._core from csrc/; everything else is in pyproject.toml. Tests read the flags from here.

ZERO_C_SANITIZE=address, undefined or thread builds it with that sanitizer.
"""

import os
import sysconfig
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Reproducible and without surprises for the host process: never -ffast-math.
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wall",
         "-Wextra"]

# One file per instruction set; a dispatcher picks at run time.
X86_FLAGS = {
    "cpu_kernels_avx2.c": ["-mavx2", "-mf16c", "-mbmi2"],
    "cpu_kernels_avx512.c": ["-mavx2", "-mf16c", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
}


def sanitizer_flags():
    kind = os.environ.get("ZERO_C_SANITIZE", "")
    if kind not in ("", "address", "undefined", "thread"):
        raise SystemExit(f"ZERO_C_SANITIZE is {kind!r}; legal are address, undefined, thread")
    return [f"-fsanitize={kind}", "-fno-omit-frame-pointer", "-g"] if kind else []


class BuildExt(build_ext):
    """setuptools' own, with flags that depend on the source file."""

    def build_extensions(self):
        compile_one = self.compiler._compile
        is_x86 = sysconfig.get_platform().endswith("x86_64")

        def compile_with_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            extra = X86_FLAGS.get(Path(src).name, []) if is_x86 else []
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *extra], pp_opts)

        self.compiler._compile = compile_with_flags
        super().build_extensions()


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "zero_c._core",
                sources=sorted(str(path) for path in Path("csrc").glob("*.c")),
                depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
                include_dirs=[numpy.get_include()],
                extra_compile_args=FLAGS + sanitizer_flags(),
                extra_link_args=["-pthread", "-lm"] + sanitizer_flags(),
            )
        ],
        cmdclass={"build_ext": BuildExt},
    )
