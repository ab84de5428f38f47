#!/usr/bin/env python3
"""Build the modules for the CPU and for NCCL with AddressSanitizer and UndefinedBehaviorSanitizer,
and run their tests.

Options go to pytest. Needs GCC or Clang with its sanitizers, and an environment with what
requirements-dev.txt pins.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "bmt-kernels"
BUILD = PACKAGE / "build" / "sanitized"
MODULES = ("_cpu", "_nccl")
# What needs the metadata of an installed package is about finding the kernels, not about what they
# do to memory.
TESTS = [
    f"tests/test_{name}.py"
    for name in ("adam", "casts", "cross_entropy", "gradients", "nccl_engine")
]


def main(arguments: Sequence[str]) -> int:
    """Build, test, and return pytest's exit status."""
    build()
    # An absolute path, so that the sanitizers get a copy of the package and not the installed one.
    stage = BUILD / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    shutil.copytree(PACKAGE / "src", stage, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in MODULES:
        (module,) = BUILD.glob(f"{name}*.so")
        shutil.copy(module, stage / "bmt_kernels")
    tests = [str(PACKAGE / test) for test in TESTS]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    # -S: without the finders of editable installs, which would put the installed module in front of
    # this one.
    command = [sys.executable, "-S", "-m", "pytest", *options, *tests, *arguments]
    return subprocess.run(command, cwd=BUILD, env=environment(stage)).returncode


def build() -> None:
    """Compile the modules, as far as they have changed since the last time."""
    pybind11 = subprocess.check_output(
        [sys.executable, "-m", "pybind11", "--cmakedir"], text=True
    ).strip()
    settings = {
        "BMT_SANITIZE": "ON",
        "BMT_WERROR": "ON",
        "CMAKE_CXX_FLAGS_RELEASE": "-O0 -DNDEBUG",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11,
    }
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    cmake = [sys.executable, "-m", "cmake"]
    for command in (
        [
            *cmake,
            "-S",
            str(PACKAGE),
            "-B",
            str(BUILD),
            "-G",
            "Ninja",
            "--log-level=WARNING",
            *definitions,
        ],
        [*cmake, "--build", str(BUILD), "--target", *MODULES],
    ):
        subprocess.run(
            command,
            check=True,
            env={**os.environ, "PATH": f"{scripts()}{os.pathsep}{os.environ['PATH']}"},
        )


def environment(stage: Path) -> dict[str, str]:
    """Return the environment in which the sanitized module is the one that is found, and every
    finding ends the tests.
    """
    compiler = os.environ.get("CXX", "c++")
    libraries = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    site = sysconfig.get_path("purelib")
    sites = [path for path in sys.path if path == site or "site-packages" in path]
    paths = [
        stage,
        *(
            ROOT / "packages" / name / "src"
            for name in ("bmt-core", "bmt-params", "bmt-testing", "bmtrain")
        ),
        *sites,
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, paths))),
        # Python is not built with the sanitizers, so their libraries must come before all others.
        "LD_PRELOAD": " ".join(libraries),
        # Leaks: Python keeps what it has until the end. Signs of overlap in the order of
        # constructors are torch's.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:abort_on_error=1"
        ":allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def scripts() -> str:
    """Return the directory of the environment's programs, of which ninja is one."""
    return str(Path(sys.executable).parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
