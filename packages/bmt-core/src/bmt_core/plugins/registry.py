"""The registry: the installed plugins and what they offer, each kind asked once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Self

import pluggy

from bmt_core.errors import BmtError, ConfigError, PluginError
from bmt_core.plugins import hookspecs
from bmt_core.plugins.discovery import (
    DISABLE_VARIABLE,
    choose,
    disabled_by_environment,
    installed_entry_points,
    unknown_name,
)
from bmt_core.plugins.implementations import implemented_hooks
from bmt_core.plugins.info import PluginInfo
from bmt_core.plugins.kinds import AXIS, KINDS, check_offers
from bmt_core.settings import MeshAxis, RunSettings

if TYPE_CHECKING:
    import click
    import torch

    from bmt_core.checkpoint import CheckpointFormat
    from bmt_core.comm.protocols import CommBackend
    from bmt_core.ops.provider import KernelProvider
    from bmt_core.run.runtime import Runtime

# Axis -> the setting that asks for it and the package that will bring it.
_AXIS_PROVIDERS = {"tp": ("tp_size", "bmt-tp"), "pp": ("pipe_size", "bmt-pipeline")}


class Registry:
    """The plugins of this process. :meth:`load` finds the installed ones; :meth:`register` adds an object by hand."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._infos: dict[str, PluginInfo] = {}
        self._answers: dict[str, _Answers] = {}
        self.disabled: tuple[str, ...] = ()
        self.problems: list[BmtError] = []

    @classmethod
    def load(cls, *, disabled: Iterable[str] = ()) -> Self:
        """Load every installed plugin except those in ``disabled`` and ``BMT_DISABLE_PLUGINS``.

        Raises PluginError when one cannot be loaded, and says which, whose it is, and why.
        """
        registry = cls.load_what_works(disabled=disabled)
        _raise_any(registry.problems)
        return registry

    @classmethod
    def load_what_works(cls, *, disabled: Iterable[str] = ()) -> Self:
        """Load like :meth:`load`, but keep the errors in ``problems``, for programs that report them."""
        registry = cls()
        registry.disabled = tuple(sorted({*disabled, *disabled_by_environment()}))
        chosen, problems = choose(installed_entry_points(), registry.disabled)
        registry.problems.extend(problems)
        for entry in chosen:
            try:
                registry._load(entry)
            except BmtError as problem:
                registry.problems.append(problem)
        registry._manager.check_pending()
        return registry

    def register(self, plugin: object, name: str) -> None:
        """Add a module or object of hook implementations under ``name``."""
        self._add(plugin, PluginInfo(name))

    @property
    def comm_backends(self) -> Mapping[str, type[CommBackend]]:
        """The communication backends by name."""
        return self._offers("comm backend")

    @property
    def kernel_providers(self) -> Mapping[str, type[KernelProvider]]:
        """The kernel providers by name."""
        return self._offers("kernel provider")

    @property
    def optimizers(self) -> Mapping[str, type[torch.optim.Optimizer]]:
        """The optimizers by name."""
        return self._offers("optimizer")

    @property
    def checkpoint_formats(self) -> Mapping[str, type[CheckpointFormat]]:
        """The checkpoint formats by name."""
        return self._offers("checkpoint format")

    @property
    def cli_commands(self) -> Mapping[str, click.Command]:
        """The commands of the program ``bmt`` by name."""
        return self._offers("command")

    def find(self, kind: str, name: str) -> Any:
        """Return what is offered as ``name``.

        ``kind`` is ``"optimizer"``, ``"comm backend"``, ``"kernel provider"``, ``"checkpoint format"`` or ``"command"``.
        Raises PluginError with the nearest and all known names when there is none.
        """
        offers = self._offers(kind)
        if name not in offers:
            raise PluginError(unknown_name(kind, name, offers))
        return offers[name]

    def mesh_axes(self, settings: RunSettings) -> list[MeshAxis]:
        """Return the axes that plugins add to the grid for ``settings``, sorted by (order, name).

        Raises ConfigError when the settings ask for an axis that no plugin brings.
        """
        owners = {"dp": "bmt-core"}  # the axis of the ranks that the others leave
        axes: list[MeshAxis] = []
        for implementation in self._implementations(AXIS.hook):
            plugin = implementation.plugin_name
            offered = self._call(AXIS.hook, implementation, config=settings)
            for name, axis in check_offers(AXIS, offered, self._infos[plugin].title):
                if name in owners:
                    raise self._doubled(AXIS.name, name, owners[name], plugin)
                owners[name] = plugin
                axes.append(axis)
        for name, (setting, package) in _AXIS_PROVIDERS.items():
            size = getattr(settings, setting)
            if size > 1 and name not in owners:
                raise ConfigError(
                    f"{setting}={size} needs the axis {name!r}, which no active plugin provides. "
                    f"The package for it, {package}, does not exist yet: "
                    f"leave {setting} at its default, or add a plugin whose hook bmt_mesh_axes brings the axis."
                )
        return sorted(axes, key=lambda axis: (axis.order, axis.name))

    def describe(self) -> list[PluginInfo]:
        """Return what is registered, sorted by name."""
        return [self._infos[name] for name in sorted(self._infos)]

    def names_of(self, plugin: str) -> dict[str, list[str]]:
        """Return the names that ``plugin`` offers, by kind; kinds without any are left out."""
        names = {kind: [name for name, owner in self._ask(kind).owners.items() if owner == plugin] for kind in KINDS}
        return {kind: sorted(offered) for kind, offered in names.items() if offered}

    def working(self, kind: str) -> Mapping[str, Any]:
        """Return the offers of ``kind`` that are in order, by name, whatever the others are."""
        return self._ask(kind).offers

    def examine(self) -> list[BmtError]:
        """Ask every kind and return all that is wrong, in loading and in answering."""
        return self.problems + [problem for kind in KINDS for problem in self._ask(kind).problems]

    def run_started(self, runtime: Runtime) -> None:
        """Tell every plugin, in name order, that the run has started."""
        for implementation in self._implementations("bmt_run_started"):
            self._call("bmt_run_started", implementation, runtime=runtime)

    def run_stopping(self, runtime: Runtime) -> None:
        """Tell every plugin, in name order, that the run stops; raise only when all have been told."""
        problems: list[BmtError] = []
        for implementation in self._implementations("bmt_run_stopping"):
            try:
                self._call("bmt_run_stopping", implementation, runtime=runtime)
            except BmtError as problem:
                problems.append(problem)
        _raise_any(problems)

    def _load(self, entry: EntryPoint) -> None:
        info = PluginInfo(entry.name)
        if entry.dist is not None:
            info = replace(info, distribution=entry.dist.name, version=entry.dist.version)
        try:
            plugin = entry.load()
        except Exception as error:
            raise PluginError(
                f"The {info.title} cannot be imported from {entry.value}: {type(error).__name__}: {error}. "
                f"Repair or uninstall it, or turn it off: {DISABLE_VARIABLE}={entry.name}"
            ) from error
        self._add(plugin, info)

    def _add(self, plugin: object, info: PluginInfo) -> None:
        if info.name in self._infos:
            raise PluginError(f"Two plugins are named {info.name!r}. Register the second under another name.")
        if self._manager.is_registered(plugin):
            raise PluginError(f"The {info.title} is registered already, as {self._manager.get_name(plugin)!r}.")
        hooks = implemented_hooks(self._manager, plugin, info.title)
        self._manager.register(plugin, info.name)
        self._infos[info.name] = replace(info, hooks=hooks)
        self._answers.clear()

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        return sorted(implementations, key=lambda implementation: implementation.plugin_name)

    def _call(self, hook: str, implementation: pluggy.HookImpl, **arguments: object) -> Any:
        # Not through pluggy's caller, which answers in an order of its own and does not say who answered what.
        try:
            return implementation.function(*(arguments[name] for name in implementation.argnames))
        except BmtError:
            raise
        except Exception as error:
            title = self._infos[implementation.plugin_name].title
            raise PluginError(f"The {title} failed in {hook}(): {type(error).__name__}: {error}") from error

    def _offers(self, kind: str) -> Mapping[str, Any]:
        answers = self._ask(kind)
        _raise_any(answers.problems)
        return answers.offers

    def _ask(self, kind: str) -> _Answers:
        if kind not in KINDS:
            raise ValueError(unknown_name("kind of plugin", kind, KINDS))
        if kind not in self._answers:
            self._answers[kind] = self._collect(kind)
        return self._answers[kind]

    def _collect(self, kind: str) -> _Answers:
        answers, hook = _Answers(), KINDS[kind].hook
        for implementation in self._implementations(hook):
            plugin = implementation.plugin_name
            try:
                offered = check_offers(KINDS[kind], self._call(hook, implementation), self._infos[plugin].title)
            except BmtError as problem:
                answers.problems.append(problem)
                continue
            for name, offer in offered:
                if name in answers.offers:
                    answers.problems.append(self._doubled(kind, name, answers.owners[name], plugin))
                else:
                    answers.offers[name], answers.owners[name] = offer, plugin
        return answers

    def _doubled(self, kind: str, name: str, first: str, second: str) -> PluginError:
        one, other = (self._infos.get(plugin, PluginInfo(plugin)).title for plugin in (first, second))
        if first == second:
            return PluginError(f"The {one} offers the {kind} {name!r} twice. Rename one of them.")
        return PluginError(
            f"The {kind} {name!r} is offered twice: by the {one} and by the {other}. "
            f"Turn one of them off: {DISABLE_VARIABLE}={first} or {DISABLE_VARIABLE}={second}"
        )


@dataclass(frozen=True)
class _Answers:
    """What all plugins answered for one kind: offers and their owners by name, and what was wrong."""

    offers: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    problems: list[BmtError] = field(default_factory=list)


def _raise_any(problems: Sequence[BmtError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PluginError("\n".join(str(problem) for problem in problems))
