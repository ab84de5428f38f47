"""``Kernels``: for each operation the kernel of the chosen provider, or the plain-torch reference."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping

import torch

from bmt_core.errors import ConfigError, PluginError, unknown_name
from bmt_core.ops import reference
from bmt_core.ops.provider import KernelProvider

OPERATIONS = tuple(reference.__all__)
REFERENCE_NAME = "reference"
VARIABLE = "BMT_KERNELS"


class Kernels:
    """The operations as methods: ``kernels.adam_step(...)`` calls the provider's kernel, or the reference if it has none.

    >>> Kernels(None).provider_name
    'reference'
    """

    adam_step = staticmethod(reference.adam_step)
    cross_entropy_backward = staticmethod(reference.cross_entropy_backward)
    cross_entropy_forward = staticmethod(reference.cross_entropy_forward)
    has_non_finite = staticmethod(reference.has_non_finite)
    powers_sum = staticmethod(reference.powers_sum)
    scale_ = staticmethod(reference.scale_)
    zero_if_ = staticmethod(reference.zero_if_)

    def __init__(self, provider: KernelProvider | None) -> None:
        self.provider = provider
        for operation in OPERATIONS:
            kernel = getattr(provider, operation, None)
            if kernel is not None:
                _check_parameters(provider, operation)
                setattr(self, operation, kernel)

    @property
    def provider_name(self) -> str:
        """Name of the active provider, ``"reference"`` when there is none."""
        return REFERENCE_NAME if self.provider is None else self.provider.name

    @property
    def has_compact_adam(self) -> bool:
        """Whether ``adam_step`` is a kernel that takes masters in two parts in one pass; the reference takes several."""
        return self.adam_step is not reference.adam_step and getattr(self.provider, "has_compact_adam", False)

    def on(self, device: torch.device) -> Kernels:
        """Return these kernels if they serve ``device``, otherwise the reference."""
        return self if self.provider is None or self.provider.device_type == device.type else REFERENCE

    def __repr__(self) -> str:
        return f"Kernels({self.provider_name})"


REFERENCE = Kernels(None)
"""The plain-torch operations, for every device."""


def choose_kernels(
    providers: Mapping[str, type[KernelProvider]], device: torch.device, name: str | None = None
) -> Kernels:
    """Return the kernels for ``device``: those called ``name``, by default ``BMT_KERNELS``, by default those that work here.

    ``"reference"`` forces plain torch. Raises :class:`ConfigError` with the reason when the provider of that name does not
    exist, is for another device, or cannot run here. Without a name, providers that cannot run here are passed over, and
    :class:`PluginError` is raised when two can.
    """
    name = os.environ.get(VARIABLE) if name is None else name
    if name:
        return Kernels(_named(providers, device, name))
    fitting = [kind() for _, kind in sorted(providers.items()) if kind.device_type == device.type]
    usable = [provider for provider in fitting if provider.available() is None]
    if len(usable) > 1:
        names = " and ".join(sorted(provider.name for provider in usable))
        raise PluginError(
            f"Several kernel providers are usable on {device.type}: {names}. Choose one: {VARIABLE}={usable[0].name}"
        )
    return Kernels(usable[0]) if usable else REFERENCE


def _named(providers: Mapping[str, type[KernelProvider]], device: torch.device, name: str) -> KernelProvider | None:
    if name == REFERENCE_NAME:
        return None
    if name not in providers:
        raise ConfigError(f"{VARIABLE}={name}: {unknown_name('kernel provider', name, [*providers, REFERENCE_NAME])}")
    if providers[name].device_type != device.type:
        raise ConfigError(
            f"{VARIABLE}={name} has kernels for {providers[name].device_type}, and this run is on {device.type}."
            f" Unset {VARIABLE}, or set it to {REFERENCE_NAME!r} for plain torch."
        )
    provider = providers[name]()
    reason = provider.available()
    if reason is not None:
        raise ConfigError(f"The kernels {name!r} ({VARIABLE}) cannot run here: {reason}.")
    return provider


def _check_parameters(provider: KernelProvider | None, operation: str) -> None:
    # Checked at the start, because a kernel without some parameter would fail in the first step that passes it.
    expected = list(inspect.signature(getattr(reference, operation)).parameters)
    found = list(inspect.signature(getattr(provider, operation)).parameters)
    if found != expected:
        raise PluginError(
            f"{type(provider).__name__}.{operation} must take the parameters ({', '.join(expected)}),"
            f" it takes ({', '.join(found)})."
        )
