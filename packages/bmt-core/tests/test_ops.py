"""The operation table and the choice of kernels. What the references compute is tested by the
conformance kit of bmt-testing, like any kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_core.errors import ConfigError, PluginError
from bmt_core.ops import (
    OPERATIONS,
    REFERENCE,
    HostFlag,
    KernelProvider,
    Kernels,
    choose_host_kernels,
    choose_kernels,
    reference,
)
from bmt_core.run import runtime
from bmt_testing.conformance.kernel_calls import (
    ADAM,
    FORMS,
    SHAPES,
    AdamRows,
    ReferenceKernels,
    calls,
    plain,
)

CPU = torch.device("cpu")


class Fast(KernelProvider):
    name = "fast"
    device_type = "cpu"
    reason: ClassVar[str | None] = None

    def available(self) -> str | None:
        return self.reason

    def scale_(self, tensors: Any, factor: Any) -> None:
        reference.scale_(tensors, factor)


class Other(Fast):
    name = "other"


class OnCuda(Fast):
    name = "on_cuda"
    device_type = "cuda"


class Broken(Fast):
    name = "broken"
    reason = "libfast.so was built for another processor"


class WrongParameters(Fast):
    name = "wrong"

    def scale_(self, tensors: Any, by: Any) -> None:  # type: ignore[override]
        pass


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Fail when a tensor's value is read on the host: what would make the host wait for a GPU."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default, (
                "a value is read on the host"
            )
            assert "nonzero" not in str(func), "a shape depends on values"
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


def test_every_operation_has_a_reference() -> None:
    for operation in OPERATIONS:
        assert getattr(REFERENCE, operation) is getattr(reference, operation)


def test_provider_is_used_for_what_it_has_and_the_reference_for_the_rest() -> None:
    provider = Fast()
    kernels = Kernels(provider)
    assert kernels.scale_ == provider.scale_
    assert kernels.adam_step is reference.adam_step
    assert kernels.name == "fast"
    assert kernels.on(CPU) is kernels
    assert kernels.on(torch.device("cuda")) is REFERENCE


def test_a_provider_says_whether_its_own_adam_takes_masters_in_two_parts() -> None:
    class Claims(Fast):
        has_compact_adam = True

    class Compact(Claims):
        adam_step = staticmethod(lambda *args, **options: None)
        adam_step.__func__.__signature__ = inspect.signature(reference.adam_step)

    assert Kernels(Compact()).has_compact_adam
    # The reference would do it, in several passes.
    assert not Kernels(Claims()).has_compact_adam
    assert not Kernels(Fast()).has_compact_adam and not REFERENCE.has_compact_adam


def test_provider_with_other_parameters_is_refused() -> None:
    with pytest.raises(
        PluginError, match=r"WrongParameters.scale_ must take the parameters \(tensors, factor\)"
    ):
        Kernels(WrongParameters())


def test_usable_providers_of_the_device_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BMT_KERNELS", raising=False)
    assert choose_kernels({}, CPU).name == "reference"
    assert choose_kernels({"fast": Fast, "on_cuda": OnCuda, "broken": Broken}, CPU).name == "fast"
    assert choose_kernels({"on_cuda": OnCuda, "broken": Broken}, CPU).name == "reference"


class Wide(Fast):
    name = "all"
    priority = -1

    def zero_if_(self, tensors: Any, flag: Any) -> None:
        reference.zero_if_(tensors, flag)


STACK: dict[str, type[KernelProvider]] = {
    "all": Wide,
    "other": Other,
    "fast": Fast,
    "on_cuda": OnCuda,
}


@pytest.mark.parametrize(
    ("names", "scale", "zero_if", "name"),
    [
        # By priority, then by name; "other" has nothing left to do.
        ("", "fast", "all", "fast + all"),
        ("all", "all", "all", "all"),
        ("other, all", "other", "all", "other + all"),
        ("all,other", "all", "all", "all"),
        ("on_cuda,other", "other", None, "other"),
        ("reference", None, None, "reference"),
    ],
)
def test_each_operation_comes_from_the_first_provider_that_has_it(
    monkeypatch: pytest.MonkeyPatch, names: str, scale: str | None, zero_if: str | None, name: str
) -> None:
    monkeypatch.setenv("BMT_KERNELS", names)
    kernels = choose_kernels(STACK, CPU)
    assert kernels.name == name
    for operation, expected in (("scale_", scale), ("zero_if_", zero_if), ("adam_step", None)):
        function = getattr(kernels, operation)
        if expected is None:
            assert (
                function is getattr(reference, operation) and operation not in kernels.provider_of
            )
        else:
            assert function.__self__.name == kernels.provider_of[operation].name == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("", "fast + all"),
        ("on_cuda", "fast + all"),
        ("on_cuda,other", "other"),
        ("reference", "reference"),
    ],
)
def test_kernels_on_the_host_follow_names_for_the_host(
    monkeypatch: pytest.MonkeyPatch, names: str, expected: str
) -> None:
    monkeypatch.setenv("BMT_KERNELS", names)
    assert choose_host_kernels(STACK).name == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fats",
            (
                "No kernel provider is named 'fats'.*Did you mean 'fast'.*Known: broken, fast,"
                " on_cuda, reference"
            ),
        ),
        ("on_cuda", "BMT_KERNELS=on_cuda has kernels for cuda, and this run is on cpu"),
        ("fast,broken", "'broken'.*cannot run here: libfast.so was built for another processor"),
        ("fast,reference", "BMT_KERNELS=fast,reference: 'reference' stands alone"),
    ],
)
def test_a_name_that_cannot_be_used_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_kernels({"fast": Fast, "on_cuda": OnCuda, "broken": Broken}, CPU, name)


def test_bmt_kernels_is_read_at_start_and_a_bad_name_is_an_error_on_every_rank(
    run_ranks: Any,
) -> None:
    assert run_ranks(_provider_name, 2, env={"BMT_KERNELS": "reference"}) == ["reference"] * 2
    for message in run_ranks(_start_error, 2, env={"BMT_KERNELS": "nope"}, init=None):
        assert "BMT_KERNELS=nope: No kernel provider is named 'nope'." in message


def _provider_name() -> str:
    return runtime.current().kernels.name


def _start_error() -> str:
    with pytest.raises(ConfigError) as caught:
        runtime.init_distributed(device="cpu")
    return str(caught.value)


def test_references_read_no_value_on_the_host() -> None:
    for call in calls(ReferenceKernels(), lambda: plain):
        with no_host_reads():
            call.run(ReferenceKernels())


@pytest.mark.parametrize("form", FORMS)
def test_adam_in_slices_is_adam(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sliced = (AdamRows(form, SHAPES, device=CPU) for _ in range(2))
    reference.adam_step(*whole.columns, **ADAM)
    monkeypatch.setattr("bmt_core.ops.reference.adam.MAX_ELEMENTS", 7)
    reference.adam_step(*sliced.columns, **ADAM)
    assert all(map(torch.equal, whole.written, sliced.written))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["float32", "bfloat16", "two parts"])
def test_on_a_gpu_temporaries_of_adam_are_bounded(form: str) -> None:
    rows = AdamRows(form, [(1 << 26,)], device=torch.device("cuda"))
    reference.adam_step(*rows.columns, **ADAM)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    reference.adam_step(*rows.columns, **ADAM)
    limit_mib = 1 if form == "float32" else 257
    assert torch.cuda.max_memory_allocated() - before <= limit_mib << 20


def test_host_flag_is_a_copy_of_the_moment() -> None:
    flag = torch.ones(1, dtype=torch.uint8)
    copy = HostFlag(flag)
    flag.zero_()
    assert copy.is_known() and copy.read() is True
    assert HostFlag(flag).read() is False


@pytest.mark.gpu
def test_host_flag_waits_for_its_point_of_the_queue_only() -> None:
    flag = torch.ones(1, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copy = HostFlag(flag)
    torch.cuda._sleep(2_000_000_000)
    after = torch.cuda.Event()  # type: ignore[no-untyped-call]
    after.record(torch.cuda.current_stream())
    assert copy.read() is True
    assert not after.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
