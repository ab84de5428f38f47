"""``KernelProvider``: what a package of compiled kernels is to bmt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class KernelProvider(ABC):
    """Compiled versions of some operations, for one type of device. Announced by the hook ``bmt_kernel_providers``.

    An operation that the provider implements is a method with the name and the parameters of the function in
    :mod:`bmt_core.ops.reference`, whose docstring is its specification; the reference serves for all others. A method may
    be called with any dtype and any strides that the reference accepts, and may itself call the reference for those that it does
    not handle. It must not synchronise the host with the device.

    A kernel that writes through a raw pointer must call ``torch.autograd.graph.increment_version`` on what it wrote: autograd
    and the sharding engine learn from the version counter that a tensor has changed.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    """``"cpu"`` or ``"cuda"``."""

    has_compact_adam: ClassVar[bool] = False
    """Whether ``adam_step`` takes masters in two parts (int16) in one pass: ``AdamOptimizer`` then keeps them so by default."""

    @abstractmethod
    def available(self) -> str | None:
        """Return None when the kernels can run in this process, otherwise the reason why not, as a clause."""
