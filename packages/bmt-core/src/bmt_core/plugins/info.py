"""``PluginInfo``: name, package, version and hooks of a registered plugin."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from bmt_core.errors import PluginError


@dataclass(frozen=True)
class PluginInfo:
    """A plugin, as ranks compare and ``bmt plugins`` prints it. ``distribution`` is empty if
    ``init_distributed()`` got it.
    """

    name: str
    distribution: str = ""
    version: str = ""
    hooks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The plugin as error messages call it.

        >>> PluginInfo("lion", "bmt-lion", "1.0").title
        "plugin 'lion' (bmt-lion 1.0)"
        """
        return f"plugin {self.name!r}" + (
            f" ({self.distribution} {self.version})" if self.distribution else ""
        )


def info_of(plugin: object) -> PluginInfo:
    """Return the info, without hooks, of a plugin that was passed as a module or an object.

    Its name is its attribute ``name`` or else that of the module or of the object's class; its
    version is ``__version__``.
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
