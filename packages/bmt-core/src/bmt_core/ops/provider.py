"""``KernelProvider``: what a package of compiled kernels must implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class KernelProvider(ABC):
    """Compiled versions of some operations, for one type of device. Announced by the hook ``bmt_kernel_providers``.

    A provider implements an operation as a method with the name and parameters of the function in
    :mod:`bmt_core.ops.reference`, whose docstring is the specification. For operations that it does not implement the reference
    is used. A method must accept every dtype and stride that the reference accepts, and may call the reference for some of
    them. It must not synchronise the host with the device.

    A kernel that writes through a raw pointer must call ``torch.autograd.graph.increment_version`` on the tensor: autograd and
    the sharding engine recognise changed tensors by the version counter.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    """``"cpu"`` or ``"cuda"``."""

    has_compact_adam: ClassVar[bool] = False
    """Whether ``adam_step`` handles int16 masters in one pass: ``AdamOptimizer`` then uses them by default."""

    @abstractmethod
    def available(self) -> str | None:
        """Return None if the kernels can run in this process, otherwise the reason, as a clause for an error message."""
