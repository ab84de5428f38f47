"""bmt-kernels as users get it: source archive, wheel, and what is in them; and its C++
under sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

import bmt_core
import dev
import sanitize_kernels

PACKAGE = dev.ROOT / "packages" / "bmt-kernels"

TRY_IT = """
import torch, bmt_kernels
from importlib.metadata import entry_points
from bmt_core.ops import Kernels, choose_kernels
from bmt_core.plugins import Registry
from bmt_kernels import CpuKernels, binaries

(entry,) = entry_points(group="bmt", name="bmt-kernels")
kernels = choose_kernels({"cpu": CpuKernels}, torch.device("cpu"))
assert kernels.name == "cpu", CpuKernels().available()
half = torch.empty(100, dtype=torch.bfloat16)
bmt_kernels.cast([torch.ones(100)], [half])
assert half.eq(1).all() and kernels.powers_sum([half], 2.0, [1.0], half.device) == 100
assert binaries.problem("_nccl") is None
print(bmt_kernels.__file__, binaries.problem("_cuda"))
"""


def run(
    *command: str,
    cwd: Path,
    expected: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SKBUILD_", "BMT_CUDA"))
    }
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == expected, result.stdout
    return result.stdout


def on_this_machine(program: str) -> str:
    """The program of the machine, where a build finds it without the development requirements."""
    outside = [
        path
        for path in os.environ["PATH"].split(os.pathsep)
        if path != str(Path(sys.executable).parent)
    ]
    found = shutil.which(program, path=os.pathsep.join(outside))
    if found is None:
        pytest.skip(f"no {program} outside of the environment of the tests")
    return found


@pytest.mark.slow("bmt-kernels", "tools/sanitize_kernels.py")
def test_source_archive_is_the_tree_and_builds_with_the_cmake_of_the_machine(
    tmp_path: Path,
) -> None:
    """One source of the CUDA module is compiled: the wheel below is built from the tree, and has
    all of them.
    """
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=PACKAGE)
    (archive,) = tmp_path.glob("bmt_kernels-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
        names = {name.partition("/")[2] for name in files.getnames()}
    directory = archive.with_name(archive.name.removesuffix(".tar.gz"))
    assert (directory / "LICENSE").stat().st_size > 10_000
    below = [
        path
        for folder in ("cmake", "csrc", "src")
        for path in (PACKAGE / folder).rglob("*")
        if path.is_file()
    ]
    kept = {str(path.relative_to(PACKAGE)) for path in below if path.suffix not in (".so", ".pyc")}
    top = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert names == kept | top

    ninja = on_this_machine("ninja")
    pybind11 = run(sys.executable, "-m", "pybind11", "--cmakedir", cwd=tmp_path).strip()
    settings = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11,
    }
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    said = run(
        *(
            on_this_machine("cmake"),
            "-S",
            str(directory),
            "-B",
            "built",
            "-G",
            "Ninja",
            *definitions,
        ),
        cwd=tmp_path,
        environment={"BMT_CUDA_ARCHITECTURES": "90"},
    )
    if shutil.which("nvcc") is None:
        assert "bmt-kernels: the CUDA module is left out: no nvcc is found on PATH" in said
        return
    assert "architectures 90" in said
    run(ninja, "-C", "built", "CMakeFiles/_cuda.dir/csrc/cuda/architectures.cu.o", cwd=tmp_path)


def test_nvcc_that_does_not_work_leaves_the_cuda_module_out_with_one_line(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(part LANGUAGES CXX)\n"
        f'include({PACKAGE}/cmake/cuda.cmake)\nmessage(STATUS "told: ${{bmt_without_cuda}}")\n'
    )
    cmake = (sys.executable, "-m", "cmake", "-S", ".", "-B", "built")
    broken = {"CUDACXX": str(nvcc)}
    why = f"{nvcc} cannot compile a program with the C++ compiler "
    said = run(*cmake, "-DBMT_CUDA=AUTO", cwd=tmp_path, environment=broken)
    assert (
        said.count(f"bmt-kernels: the CUDA module is left out: {why}") == 1
        and f"told: {why}" in said
    )
    said = run(*cmake, "-DBMT_CUDA=OFF", cwd=tmp_path, environment=broken)
    assert "bmt-kernels: the CUDA module is left out: BMT_CUDA=OFF" in said
    said = run(*cmake, "-DBMT_CUDA=ON", cwd=tmp_path, expected=1, environment=broken)
    assert f"BMT_CUDA=ON, and the CUDA module cannot be built: {why}" in " ".join(said.split())


@pytest.mark.slow("bmt-kernels", "tools/sanitize_kernels.py")
def test_wheel_installs_and_works(tmp_path: Path) -> None:
    """From the tree, where the editable installation has compiled everything before."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-index", "--no-deps")
    kept = {
        name: value
        for name, value in dev.environment().items()
        if name.startswith(("SKBUILD_", "BMT_CUDA"))
    }
    run(
        *pip,
        "wheel",
        "--no-build-isolation",
        *offline,
        str(PACKAGE),
        cwd=tmp_path,
        environment=kept,
    )
    (wheel,) = tmp_path.glob("bmt_kernels-*.whl")
    with zipfile.ZipFile(wheel) as files:
        inside = files.namelist()
    top = {name.partition("/")[0] for name in inside}
    assert len(top) == 2 and "bmt_kernels" in top, (
        "the package and its metadata, nothing beside them"
    )
    stubs = {f"bmt_kernels/{name}.pyi" for name in ("_cpu", "_cuda", "_nccl")}
    assert {"bmt_kernels/py.typed", "bmt_kernels/nccl/backend.py"} | stubs <= set(inside)
    assert any(name.endswith("licenses/LICENSE") for name in inside)

    site = tmp_path / "site"
    run(*pip, "install", *offline, "--target", str(site), str(wheel), cwd=tmp_path)
    # -S: without the finders of editable installs, which would put the tree in front of the wheel.
    paths = [site, Path(bmt_core.__file__).parents[1], Path(torch.__file__).parents[1]]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "BMT_KERNELS": ""}
    said = run(sys.executable, "-S", "-c", TRY_IT, cwd=tmp_path, environment=environment)
    assert said.startswith(str(site)), said
    assert said.endswith("None\n") or "was built without bmt_kernels._cuda: " in said, said


@pytest.mark.slow("bmt-kernels", "tools/sanitize_kernels.py")
def test_kernels_for_the_cpu_are_clean_under_the_sanitizers() -> None:
    """The tests that go to the edges of memory; tools/sanitize_kernels.py alone runs all
    of them.
    """
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    edges = (
        "in_pieces or neighbours or extreme or any_size or no_memory or of_little or nccl_engine"
    )
    assert sanitize_kernels.main(["-k", edges, "--no-header"]) == 0
