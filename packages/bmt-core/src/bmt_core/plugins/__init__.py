"""The plugins: found by entry points, checked, compared between ranks, and asked through
the registry.
"""

from bmt_core.plugins.info import PluginInfo
from bmt_core.plugins.registry import Registry

__all__ = ["PluginInfo", "Registry"]
