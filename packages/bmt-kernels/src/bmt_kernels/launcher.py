"""``Launcher``: a provider as its operations see it: a compiled module, and where to run."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Protocol, cast

import torch

from bmt_core.ops import KernelProvider
from bmt_kernels import binaries

Addresses = list[int]
Where = tuple[int, ...]


class Binary(Protocol):
    """The functions of both compiled modules, on raw addresses. They check only lengths
    and overlaps.
    """

    POWERS_SUM_WORKSPACE: int
    AdamSettings: Any

    def adam_step(
        self,
        form: int,
        grad: int,
        params: Addresses,
        grads: Addresses,
        exp_avgs: Addresses,
        exp_avg_sqs: Addresses,
        masters: Addresses,
        numels: list[int],
        settings: Any,
        where: Where,
        /,
    ) -> None: ...

    def cast(
        self,
        sources: Addresses,
        from_elements: list[int],
        targets: Addresses,
        to_elements: list[int],
        numels: list[int],
        where: Where,
        /,
    ) -> None: ...

    def has_non_finite(
        self, tensors: Addresses, numels: list[int], elements: list[int], flag: int, where: Where, /
    ) -> None: ...

    def powers_sum(
        self,
        tensors: Addresses,
        numels: list[int],
        elements: list[int],
        weights: list[float],
        kind: int,
        p: float,
        result: int,
        workspace: int,
        where: Where,
        /,
    ) -> None: ...

    def scale_(
        self,
        tensors: Addresses,
        numels: list[int],
        elements: list[int],
        factor: int,
        where: Where,
        /,
    ) -> None: ...

    def zero_if_(
        self,
        tensors: Addresses,
        numels: list[int],
        elements: list[int],
        flag: int,
        flag_is_float: bool,
        where: Where,
        /,
    ) -> None: ...

    def cross_entropy_forward(
        self,
        logits: int,
        element: int,
        rows_classes_stride: list[int],
        target: int,
        first_class: int,
        weight: int,
        results: Addresses,
        where: Where,
        /,
    ) -> None: ...

    def cross_entropy_backward(
        self,
        logits: int,
        element: int,
        rows_classes_stride: list[int],
        target: int,
        first_class: int,
        weight: int,
        factors: Addresses,
        gradient: int,
        gradient_stride: int,
        where: Where,
        /,
    ) -> None: ...


class Launcher(KernelProvider):
    """A provider as its operations see it: a compiled module, and where to run."""

    module: ClassVar[str]
    """Name of the compiled module in this package."""

    @cached_property
    def binary(self) -> Binary:
        """The compiled module; raises ``RuntimeError`` if it is not :meth:`available`."""
        module = binaries.load(self.module)
        if module is None:
            raise RuntimeError(f"The kernels {self.name!r} cannot be used: {self.available()}.")
        return cast(Binary, module)

    @abstractmethod
    def where(self, device: torch.device) -> Where:
        """Where on ``device`` work runs now: the number of threads, or the device's index and its
        current stream.
        """

    def equals_torch(self) -> bool:
        """Whether Adam on float32 parameters gives what torch gives, in every bit."""
        return True
