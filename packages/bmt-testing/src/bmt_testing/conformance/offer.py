"""``Offer``: what a plugin offers by name and a kit tests, as ranks find it again."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bmt_core.errors import PluginError
from bmt_core.plugins.registry import Registry
from bmt_core.run.bmtrain_names import check_axes_are_provided, settings_of_all_axes
from bmt_core.run.topology import check_axis_sizes
from bmt_core.settings import RunSettings
from bmt_testing.conformance.kernel_calls import REFERENCES
from bmt_testing.settings import arguments_of_axes

AXIS = "axis"
KERNELS = "kernel provider"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The offer ``name`` of ``kind`` of an installed plugin, or of one of the modules ``plugins``.

    ``options`` are those of an optimizer's constructor; ``device`` is where its runs compute.
    """

    kind: str
    name: str
    plugins: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def find(self) -> Any:
        """Return the class that is offered, or the axis in a size of 2."""
        if self._is_reference:
            return REFERENCES[self.name]
        registry = load_registry(self.plugins)
        if self.kind != AXIS:
            return registry.find(self.kind, self.name)
        settings = self._settings
        axes = registry.mesh_axes(settings)
        check_axes_are_provided(settings, axes)
        check_axis_sizes(settings.axis_sizes, axes)
        return next(axis for axis in axes if axis.name == self.name)

    @functools.cached_property
    def needs_gpu(self) -> bool:
        """Whether it is for GPUs."""
        return self.kind == KERNELS and self.find().device_type == "cuda"

    @functools.cached_property
    def title(self) -> str:
        """The offer with its plugin, for the head of a report."""
        registry = load_registry(self.plugins)
        if self._is_reference:
            plugin = "bmt-core"
        elif self.kind == AXIS:
            plugin = registry.axis_owners(self._settings)[self.name]
        else:
            plugin = registry.owners(self.kind)[self.name]
        (info,) = [info for info in registry.describe() if info.name == plugin]
        return f"{self.kind} {self.name!r} of the {info.title}"

    @property
    def _is_reference(self) -> bool:
        return self.kind == KERNELS and self.name in REFERENCES

    @property
    def _settings(self) -> RunSettings:
        return RunSettings(**arguments_of_axes({self.name: 2}))

    def run_settings(self, **settings: Any) -> dict[str, Any]:
        """Return the arguments of ``init_distributed`` for a run with the plugin."""
        if self.device != "cpu":  # as runs of a pool are without it
            settings["device"] = self.device
        modules = [importlib.import_module(module) for module in self.plugins]
        return {"plugins": modules, **settings}


def names_of(kind: str, plugins: tuple[str, ...]) -> list[str]:
    """Return the names of all offers of ``kind`` that work; of axes, those that have an argument of
    their own.
    """
    registry = load_registry(plugins)
    if kind == AXIS:
        return [axis.name for axis in registry.mesh_axes(settings_of_all_axes())]
    return [*sorted(registry.working(kind)), *(REFERENCES if kind == KERNELS else ())]


def load_registry(plugins: tuple[str, ...]) -> Registry:
    """Return the installed plugins and the modules ``plugins``; PluginError if one cannot
    be imported.
    """
    modules = []
    for module in plugins:
        try:
            modules.append(importlib.import_module(module))
        except ImportError as error:
            raise PluginError(f"The plugin {module!r} cannot be imported: {error}") from error
    return Registry.load(plugins=modules)
