"""``Offer``: what a plugin offers by name and a kit tests, as ranks find it again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bmt_core.errors import PluginError
from bmt_core.plugins.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The offer ``name`` of ``kind`` of an installed plugin, or of one of the modules ``plugins``.

    ``options`` are those of an optimizer's constructor.
    """

    kind: str
    name: str
    plugins: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def find(self) -> Any:
        """Return the class that is offered."""
        return self._built_in() or load_registry(self.plugins).find(self.kind, self.name)

    @property
    def needs_gpu(self) -> bool:
        """Whether it is for GPUs."""
        return self.kind == "kernel provider" and self.find().device_type == "cuda"

    @property
    def title(self) -> str:
        """The offer with its plugin, for the head of a report."""
        if self._built_in() is not None:
            return f"{self.kind} {self.name!r} of bmt-core"
        registry = load_registry(self.plugins)
        plugin = registry.owners(self.kind)[self.name]
        (info,) = [info for info in registry.describe() if info.name == plugin]
        return f"{self.kind} {self.name!r} of the {info.title}"

    def _built_in(self) -> Any:
        """Return what bmt-core has besides the offers of plugins."""
        from bmt_testing.conformance.kernel_calls import REFERENCES

        return REFERENCES.get(self.name) if self.kind == "kernel provider" else None

    def start_run(self, **settings: Any) -> None:
        """Start the run of this rank, with the plugin."""
        from bmt_core.run.runtime import init_distributed

        modules = [importlib.import_module(module) for module in self.plugins]
        init_distributed(**{"device": "cpu", "plugins": modules, **settings})


def names_of(kind: str, plugins: tuple[str, ...]) -> list[str]:
    """Return the names of all offers of ``kind`` that work."""
    from bmt_testing.conformance.kernel_calls import REFERENCES

    names = sorted(load_registry(plugins).working(kind))
    return [*names, *REFERENCES] if kind == "kernel provider" else names


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
