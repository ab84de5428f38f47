"""What is known about one registered plugin."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from bmt_core.errors import PluginError


@dataclass(frozen=True)
class PluginInfo:
    """What ranks compare and ``bmt plugins`` prints. ``distribution`` and ``version`` are empty for a plugin added by hand."""

    name: str
    distribution: str = ""
    version: str = ""
    hooks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """How messages call the plugin.

        >>> PluginInfo("lion", "bmt-lion", "1.0").title
        "plugin 'lion' (bmt-lion 1.0)"
        """
        return f"plugin {self.name!r}" + (f" ({self.distribution} {self.version})" if self.distribution else "")


def info_of(plugin: object) -> PluginInfo:
    """Return what is known of a plugin that was passed as a module or an object.

    It is called by its attribute ``name``, a module otherwise by its module's name and an object by its class's name; its
    version is its ``__version__``, if it has one.
    """
    if isinstance(plugin, (str, type)):
        kind = "a text" if isinstance(plugin, str) else "a class"
        raise PluginError(
            f"A plugin is a module or an object with @hookimpl functions, and {plugin!r} is {kind}."
            f" Pass {'the module itself' if isinstance(plugin, str) else 'an object of it'}."
        )
    default = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__name__
    name, version = getattr(plugin, "name", default), getattr(plugin, "__version__", "")
    return PluginInfo(name if isinstance(name, str) else default, version=str(version))
