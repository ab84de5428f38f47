"""What is known about one registered plugin."""

from __future__ import annotations

from dataclasses import dataclass


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
