"""bmt-kernels as users get it: source archive, wheel, and what is in them; and its C++ under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

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


def run(*command: str, cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SKBUILD_", "BMT_CUDA"))}
    result = subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_source_archive_and_its_wheel_install_and_work(tmp_path: Path) -> None:
    """Without the CUDA module, which takes as long again: a test of the package says whether that was compiled."""
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=PACKAGE)
    (archive,) = tmp_path.glob("bmt_kernels-*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
        licence = next(member for member in files.getmembers() if member.name.endswith("/LICENSE"))
        assert licence.isfile() and licence.size > 10_000
    assert {"CMakeLists.txt", "README.md", "csrc/cpu/module.cpp", "csrc/nccl/module.cpp", "cmake/cuda.cmake"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc")) or name.startswith("build")]

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-index", "--no-deps")
    run(*pip, "wheel", "--no-build-isolation", *offline, str(archive), cwd=tmp_path, BMT_CUDA="OFF")
    (wheel,) = tmp_path.glob("bmt_kernels-*.whl")
    with zipfile.ZipFile(wheel) as files:
        inside = files.namelist()
    top = {name.partition("/")[0] for name in inside}
    assert len(top) == 2 and "bmt_kernels" in top, "the package and its metadata, nothing beside them"
    stubs = {f"bmt_kernels/{name}.pyi" for name in ("_cpu", "_cuda", "_nccl")}
    assert {"bmt_kernels/py.typed", "bmt_kernels/nccl/backend.py"} | stubs <= set(inside)
    assert any(name.endswith("licenses/LICENSE") for name in inside)

    site = tmp_path / "site"
    run(*pip, "install", *offline, "--target", str(site), str(wheel), cwd=tmp_path)
    # -S: without the finders of editable installs, which would put the tree in front of the wheel.
    paths = [site, Path(bmt_core.__file__).parents[1], Path(torch.__file__).parents[1]]
    said = run(
        sys.executable, "-S", "-c", TRY_IT, cwd=tmp_path, PYTHONPATH=os.pathsep.join(map(str, paths)), BMT_KERNELS=""
    )
    assert said.startswith(str(site)) and "was built without bmt_kernels._cuda" in said, said


def test_kernels_for_the_cpu_are_clean_under_the_sanitizers() -> None:
    """The tests that go to the edges of memory; tools/sanitize_kernels.py alone runs all of them."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    edges = "in_pieces or neighbours or extreme or any_size or no_memory or of_little or nccl_engine"
    assert sanitize_kernels.main(["-k", edges, "--no-header"]) == 0
