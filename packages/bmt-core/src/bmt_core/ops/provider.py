"""``KernelProvider``: what a package of compiled kernels must implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from bmt_core.ops import reference
from bmt_core.ops.peer_link import PeerLink

OPERATIONS = tuple(reference.__all__)


class KernelProvider(ABC):
    """Compiled versions of some operations, for one type of device. Announced by the hook
    ``bmt_kernel_providers``.

    A provider implements an operation as a method with the name and parameters of the function in
    :mod:`bmt_core.ops.reference`, whose docstring is the specification. Operations that it does not
    implement come from the next provider of the device, see :attr:`priority`, and from the
    reference where no provider has them. A method must accept every dtype and stride that the
    reference accepts, and may call the reference for some of them. Arguments that do not fit are
    errors before anything is written. It must not synchronise the host with the device.

    A kernel that writes through a raw pointer must call ``torch.autograd.graph.increment_version``
    on the tensor: autograd and the sharding engine recognise changed tensors by the
    version counter.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    """``"cpu"`` or ``"cuda"``."""

    priority: ClassVar[int] = 0
    """Where several providers of one device have an operation, the one with the highest priority
    does it; of equal ones, the first by name. Those of ``bmt-kernels`` have -100, so that others
    come before them. ``BMT_KERNELS`` overrides the order."""

    has_compact_adam: ClassVar[bool] = False
    """Whether ``adam_step`` handles int16 masters in one pass: ``AdamOptimizer`` then uses them
    by default.
    """

    @classmethod
    def operations(cls) -> tuple[str, ...]:
        """Return the names of the operations that this provider implements."""
        return tuple(operation for operation in OPERATIONS if hasattr(cls, operation))

    @abstractmethod
    def available(self) -> str | None:
        """Return None if the kernels can run in this process, otherwise the reason, as a clause for
        an error message.
        """

    def peer_link(self) -> PeerLink | None:
        """Return a :class:`PeerLink` for the current device; None if this provider has none."""
        return None
