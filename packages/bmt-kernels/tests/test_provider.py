"""How the kernels are found, and what happens where they cannot be used."""

from __future__ import annotations

import ast
import inspect
import logging
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

from bmt_core.ops import OPERATIONS, Kernels, choose_kernels, reference
from bmt_core.plugins import Registry
from bmt_core.run.runtime import Runtime
from bmt_kernels import CpuKernels, CudaKernels, binaries, bits, plugin, provider
from bmtrain._program import main

CPU = torch.device("cpu")


@pytest.fixture
def without_binaries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[Exception], None]]:
    """Make the compiled modules fail to load with an exception."""

    def break_them(error: Exception) -> None:
        def fail(name: str) -> ModuleType:
            raise error

        monkeypatch.setattr(binaries, "_DIRECTORY", tmp_path)
        monkeypatch.setattr(binaries.importlib, "import_module", fail)
        _forget()

    yield break_them
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    for function in (binaries.load, binaries.problem, binaries._attempt):
        function.cache_clear()


def run(kernels: Kernels, rank: int = 0, local_rank: int = 0) -> Runtime:
    launch = SimpleNamespace(local_rank=local_rank)
    return cast(Runtime, SimpleNamespace(rank=rank, launch=launch, kernels=kernels, device=CPU))


def test_every_operation_has_kernels_with_the_parameters_of_the_reference() -> None:
    for kind in (CpuKernels, CudaKernels):
        kernels = Kernels(kind())
        for operation in OPERATIONS:
            ours = inspect.signature(getattr(kernels, operation))
            assert ours == inspect.signature(getattr(reference, operation)), operation


def test_registry_finds_them_and_the_cpu_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BMT_KERNELS", raising=False)
    others = {entry.name for entry in entry_points(group="bmt")} - {"bmt-core", "bmt-kernels"}
    monkeypatch.setenv("BMT_DISABLE_PLUGINS", ",".join(others))
    providers = Registry.load().kernel_providers
    assert providers == {"cpu": CpuKernels, "cuda": CudaKernels}
    assert choose_kernels(providers, CPU).name == "cpu"
    assert choose_kernels(providers, CPU, "reference").name == "reference"


def test_cpu_module_has_the_instructions_of_this_processor() -> None:
    binary: Any = CpuKernels().binary
    assert binary.instruction_sets()[0] == "portable"
    assert binary.instruction_set() == binary.instruction_sets()[-1]
    with pytest.raises(ValueError, match="No usable instruction set is named 'sse9'"):
        binary.use_instruction_set("sse9")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ModuleNotFoundError("gone", name="bmt_kernels._cpu"),
            "was built without bmt_kernels._cpu",
        ),
        (
            ModuleNotFoundError("No module named 'x'", name="x"),
            "bmt_kernels._cpu cannot be loaded: No module named 'x'",
        ),
        (
            ImportError("undefined symbol: _ZN"),
            "bmt_kernels._cpu cannot be loaded: undefined symbol: _ZN",
        ),
        (SystemError("no exception set"), "bmt_kernels._cpu cannot be loaded: no exception set"),
        (RuntimeError(), "bmt_kernels._cpu cannot be loaded: RuntimeError"),
    ],
)
def test_without_a_working_module_the_reference_serves_with_one_visible_line(
    without_binaries: Callable[[Exception], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    monkeypatch.delenv("BMT_KERNELS", raising=False)
    without_binaries(error)
    problem = CpuKernels().available()
    assert problem is not None and reason in problem
    kernels = choose_kernels({"cpu": CpuKernels}, CPU)
    assert kernels.name == "reference"
    with pytest.raises(RuntimeError, match="The kernels 'cpu' cannot be used"):
        _ = CpuKernels().binary
    with caplog.at_level(logging.WARNING):
        for rank in (8, 9):
            plugin.bmt_run_started(run(kernels, rank=rank, local_rank=rank - 8))
    (record,) = caplog.records
    assert (
        "rank 8: the compiled kernels of bmt-kernels for cpu cannot be used" in record.getMessage()
    )
    assert reason in record.getMessage()


def test_a_module_for_another_python_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "_gpu.cpython-39-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(binaries, "_DIRECTORY", tmp_path)
    assert "has only _gpu.cpython-39-x86_64-linux-gnu.so, which is for another Python" in str(
        binaries.problem("_gpu")
    )


@pytest.mark.parametrize("kept", [0, 40, 5000, -1])
def test_a_file_that_was_cut_off_is_not_loaded_which_would_end_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: int
) -> None:
    whole = Path(str(CpuKernels().binary.__file__))  # type: ignore[attr-defined]
    assert not binaries.is_cut_off(whole)
    package = tmp_path / f"cut_off_{abs(kept)}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / whole.name).write_bytes(whole.read_bytes()[:kept])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(binaries, "__package__", package.name)
    _forget()
    try:
        assert binaries.load("_cpu") is None
        problem = str(binaries.problem("_cpu"))
    finally:
        _forget()
    assert f"{package / whole.name} is not whole" in problem or (
        kept == 0 and "cannot be loaded" in problem
    )


def test_nothing_is_said_when_the_reference_was_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BMT_KERNELS", "reference")
    kernels = choose_kernels({"cpu": CpuKernels}, CPU)
    plugin.bmt_run_started(run(kernels))
    monkeypatch.delenv("BMT_KERNELS")
    kernels = choose_kernels({"cpu": CpuKernels}, CPU)
    plugin.bmt_run_started(run(kernels))
    assert not caplog.records


def test_doctor_says_what_is_active_and_why_not(
    without_binaries: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BMT_KERNELS", raising=False)
    monkeypatch.setattr("bmt_core.cli.output._WIDTH_WITHOUT_TERMINAL", 300)
    active = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"active on {active}" in CliRunner().invoke(main, ["doctor", "--all"]).output
    without_binaries(ImportError("undefined symbol: _ZN"))
    output = CliRunner().invoke(main, ["doctor", "--all"]).output
    assert (
        f"cannot be used: bmt_kernels._{active} cannot be loaded: undefined symbol: _ZN" in output
    )
    assert "plain torch, the fallback" in output


def test_float32_adam_equals_torch_on_this_processor_or_is_left_to_the_reference() -> None:
    """Whether it does is tried out, and here there is a square root with which it does."""
    kernels = CpuKernels()
    assert kernels.equals_torch()
    module = binaries.load("_cpu")
    assert module is not None and bits.choose_square_root(module)


def test_cuda_module_is_compiled_for_hopper_where_there_is_a_compiler() -> None:
    module = binaries.load("_cuda")
    if module is None and shutil.which("nvcc") is None:
        pytest.skip(f"no nvcc, and no CUDA module: {binaries.problem('_cuda')}")
    assert module is not None, binaries.problem("_cuda")
    assert 900 in module.ARCHITECTURES


@pytest.mark.parametrize("name", ["_cpu", "_cuda", "_nccl"])
def test_stub_has_what_the_compiled_module_has(name: str) -> None:
    module = binaries.load(name)
    if module is None:
        pytest.skip(f"no such module here: {binaries.problem(name)}")
    stub = ast.parse(Path(provider.__file__).with_name(f"{name}.pyi").read_text())
    functions = {item.name: item for item in stub.body if isinstance(item, ast.FunctionDef)}
    others = {item.name for item in stub.body if isinstance(item, ast.ClassDef)}
    others |= {
        item.target.id
        for item in stub.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assert {
        public for public in dir(module) if not public.startswith("_")
    } == functions.keys() | others
    for public, item in functions.items():
        # pybind11 writes the signature in the first line of the docstring.
        (signature, *_) = getattr(module, public).__doc__.splitlines()
        assert signature.count(": ") == len(item.args.posonlyargs) + len(item.args.args), signature


def test_stub_has_what_the_classes_for_nccl_have() -> None:
    module = binaries.load("_nccl")
    assert module is not None, binaries.problem("_nccl")
    stub = ast.parse(Path(provider.__file__).with_name("_nccl.pyi").read_text())
    for kind in (item for item in stub.body if isinstance(item, ast.ClassDef)):
        members = {item.name: item for item in kind.body if isinstance(item, ast.FunctionDef)}
        real = vars(getattr(module, kind.name))
        assert {name for name in real if not name.startswith("_")} == members.keys() - {"__init__"}
        for name, item in members.items():
            if not item.decorator_list:
                (signature, *_) = real[name].__doc__.splitlines()
                taken = len(item.args.posonlyargs) + len(item.args.args)
                assert signature.replace("(self: ", "(: ").count(": ") == taken, signature


def test_cuda_kernels_are_not_used_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CudaKernels().available() == "torch finds no usable GPU"


def test_cuda_kernels_are_not_used_on_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(binaries, "load", lambda name: SimpleNamespace(ARCHITECTURES=[900]))
    assert CudaKernels().available() == "bmt-kernels was built for sm_90, and this GPU is sm_61"
