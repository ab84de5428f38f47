"""``COMMANDS``: the commands of bmt's packages, which ``bmt --help`` lists without an import."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from os import environ
from typing import NamedTuple, cast

import click

# As bmt_core.plugins.discovery has them, whose import would import torch.
_GROUP, _DISABLED = "bmt", "BMT_DISABLE_PLUGINS"


class Command(NamedTuple):
    """Where a command is, and what the help says of it."""

    package: str
    module: str
    help: str

    def load(self, name: str) -> click.Command:
        """Import the command called ``name``."""
        value = f"{self.module}:{name.replace('-', '_')}"
        return cast("click.Command", EntryPoint(name, value, _GROUP).load())


COMMANDS = {
    "bench": Command("bmt-train", "bmtrain._program.bench", "Measure collectives between ranks."),
    "checkpoint": Command(
        "bmt-checkpoint", "bmt_checkpoint.cli", "Inspect, verify, convert and compare checkpoints."
    ),
    "doctor": Command(
        "bmt-train", "bmtrain._program.doctor", "Find what is broken or slow in this installation."
    ),
    "hang": Command("bmt-watch", "bmt_watch.hang", "Say which rank did not make which call."),
    "memory": Command(
        "bmt-train", "bmtrain._program.memory", "Predict the memory of a training; what fits?"
    ),
    "pipeline-plan": Command(
        "bmt-pipeline", "bmt_pipeline.cli", "Draw a pipeline schedule, its bubble and its memory."
    ),
    "plugins": Command(
        "bmt-train", "bmtrain._program.plugins", "List plugins and what each one offers."
    ),
    "verify": Command(
        "bmt-testing", "bmt_testing.verify_command", "Compare a training with plain torch."
    ),
}
"""By name. A test compares them with what the packages announce by ``bmt_cli_commands``."""


WITHOUT_COMMANDS = frozenset(
    ("bmt-core", "bmt-cp", "bmt-hf", "bmt-kernels", "bmt-optim", "bmt-params", "bmt-tp", "bmt-zero")
)
"""The plugins of bmt's other packages."""
_ALWAYS = "bmt-train"


def installed_commands() -> dict[str, Command]:
    """Return those of the program itself, and those whose plugin is installed and not turned
    off.
    """
    names = {_ALWAYS, *_plugins()}
    return {name: each for name, each in COMMANDS.items() if each.package in names}


def foreign_plugins() -> list[str]:
    """Return the names of the plugins that are not of bmt's packages, sorted."""
    own = {each.package for each in COMMANDS.values()} | WITHOUT_COMMANDS
    return sorted(_plugins() - own)


def _plugins() -> set[str]:
    off = {name.strip() for name in environ.get(_DISABLED, "").split(",")}
    return {entry.name for entry in entry_points(group=_GROUP)} - off
