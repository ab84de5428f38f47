"""``choose_kernels``: the kernels of a device, from the providers that are installed and
from ``BMT_KERNELS``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch

from bmt_core.errors import ConfigError, unknown_name
from bmt_core.ops.kernels import REFERENCE, REFERENCE_NAME, Kernels
from bmt_core.ops.provider import KernelProvider
from bmt_core.packages import install_hint

VARIABLE = "BMT_KERNELS"

Providers = Mapping[str, type[KernelProvider]]


def choose_kernels(providers: Providers, device: torch.device, names: str | None = None) -> Kernels:
    """Return the kernels for ``device``. Each operation comes from the first provider that has it,
    else from the reference.

    ``names``, by default ``BMT_KERNELS``, lists providers in the order in which they are asked,
    with commas between them; others are left out, and so are those for other devices.
    ``"reference"`` alone turns all off. Without names, all providers of the device that can run
    here are asked, in the order of :func:`by_priority`.

    Raises :class:`ConfigError` when a provider that is named does not exist or cannot run here, and
    when none of them is for ``device``; :class:`PluginError` when a kernel does not have the
    parameters of its reference.
    """
    names = os.environ.get(VARIABLE, "") if names is None else names
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        usable = (
            kind() for kind in by_priority(providers.values()) if kind.device_type == device.type
        )
        return Kernels(*(provider for provider in usable if provider.available() is None))
    if asked == [REFERENCE_NAME]:
        return REFERENCE
    return Kernels(*_named(providers, device, asked, f"{VARIABLE}={names}"))


def choose_host_kernels(providers: Providers) -> Kernels:
    """Return the kernels for work on the host in a run on another device.

    Like :func:`choose_kernels`. But if ``BMT_KERNELS`` names only providers for the run's device,
    the host's are chosen without it.
    """
    host = torch.device("cpu")
    asked = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
    says_something = asked == {REFERENCE_NAME} or any(
        name in providers and providers[name].device_type == host.type for name in asked
    )
    return choose_kernels(providers, host, None if says_something else "")


def by_priority(providers: Iterable[type[KernelProvider]]) -> list[type[KernelProvider]]:
    """Return ``providers`` in the order in which they are asked: highest priority first, then
    by name.
    """
    return sorted(providers, key=lambda provider: (-provider.priority, provider.name))


def _named(
    providers: Providers, device: torch.device, names: Sequence[str], setting: str
) -> list[KernelProvider]:
    for name in names:
        if name == REFERENCE_NAME:
            raise ConfigError(
                f"{setting}: {REFERENCE_NAME!r} stands alone, to turn all kernels off. What no"
                " provider has comes from it anyway."
            )
        if name not in providers:
            known = [*providers, REFERENCE_NAME]
            raise ConfigError(
                f"{setting}: {unknown_name('kernel provider', name, known)}{install_hint(name)}"
            )
    fitting = [
        providers[name]()
        for name in dict.fromkeys(names)
        if providers[name].device_type == device.type
    ]
    if not fitting:
        kinds = " and ".join(sorted({providers[name].device_type for name in names}))
        raise ConfigError(
            f"{setting} has kernels for {kinds}, and this run is on {device.type}."
            f" Unset {VARIABLE}, or set it to {REFERENCE_NAME!r} for plain torch."
        )
    for provider in fitting:
        if (reason := provider.available()) is not None:
            raise ConfigError(
                f"The kernels {provider.name!r} ({setting}) cannot run here: {reason}."
            )
    return fitting
