"""The errors that people meet. Each message says what was expected, what came, and what to do."""

from __future__ import annotations


class BmtError(Exception):
    """Base of every error that bmt raises on purpose."""


class ConfigError(BmtError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class NotInitializedError(BmtError, RuntimeError):
    """Something that needs a running bmt was used before ``init_distributed()``."""


class PluginError(BmtError):
    """A plugin is broken, doubled, unknown, or not the same on every rank."""


class CheckpointError(BmtError):
    """A checkpoint cannot be written, read, or does not fit the model."""


class RemoteError(BmtError, RuntimeError):
    """Another rank failed inside a section that all ranks leave together."""
