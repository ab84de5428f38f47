"""``Kernels``: for each operation the kernel of the first provider that has it, or the
plain-torch reference.
"""

from __future__ import annotations

import inspect

import torch

from bmt_core.errors import PluginError
from bmt_core.ops import reference
from bmt_core.ops.peer_link import PeerLink
from bmt_core.ops.provider import KernelProvider

REFERENCE_NAME = "reference"


class Kernels:
    """The operations as methods: ``kernels.adam_step(...)`` calls the kernel of the first of
    ``providers`` that has one.

    An operation that no provider has is the reference's. All providers are for one type of device.

    >>> Kernels().name
    'reference'
    """

    adam_step = staticmethod(reference.adam_step)
    cross_entropy_backward = staticmethod(reference.cross_entropy_backward)
    cross_entropy_forward = staticmethod(reference.cross_entropy_forward)
    has_non_finite = staticmethod(reference.has_non_finite)
    powers_sum = staticmethod(reference.powers_sum)
    scale_ = staticmethod(reference.scale_)
    zero_if_ = staticmethod(reference.zero_if_)

    def __init__(self, *providers: KernelProvider) -> None:
        self.provider_of: dict[str, KernelProvider] = {}
        """The provider of each operation, without the operations of the reference."""
        self._providers = providers
        for provider in providers:
            for operation in provider.operations():
                _check_parameters(provider, operation)
                if operation not in self.provider_of:
                    self.provider_of[operation] = provider
                    setattr(self, operation, getattr(provider, operation))

    @property
    def name(self) -> str:
        """The names of the providers in use, such as ``"mine + cpu"``; ``"reference"`` only if no
        provider has any operation.
        """
        return (
            " + ".join(dict.fromkeys(provider.name for provider in self.provider_of.values()))
            or REFERENCE_NAME
        )

    @property
    def has_compact_adam(self) -> bool:
        """Whether ``adam_step`` is a kernel that takes masters in two parts in one pass; the
        reference takes several.
        """
        return "adam_step" in self.provider_of and self.provider_of["adam_step"].has_compact_adam

    def peer_link(self) -> PeerLink | None:
        """Return the :meth:`KernelProvider.peer_link` of the first provider that has one; None if
        none has.
        """
        return next(
            (link for provider in self._providers if (link := provider.peer_link()) is not None),
            None,
        )

    def on(self, device: torch.device) -> Kernels:
        """Return these kernels if they serve ``device``, otherwise the reference."""
        return (
            self
            if all(provider.device_type == device.type for provider in self.provider_of.values())
            else REFERENCE
        )

    def __repr__(self) -> str:
        return f"Kernels({self.name})"


REFERENCE = Kernels()
"""The plain-torch operations, for every device."""


def _check_parameters(provider: KernelProvider, operation: str) -> None:
    # Checked at the start, because a kernel without some parameter would fail in the first step
    # that passes it.
    expected = list(inspect.signature(getattr(reference, operation)).parameters)
    found = list(inspect.signature(getattr(provider, operation)).parameters)
    if found != expected:
        raise PluginError(
            f"{type(provider).__name__}.{operation} must take the parameters"
            f" ({', '.join(expected)}), it takes ({', '.join(found)})."
        )
