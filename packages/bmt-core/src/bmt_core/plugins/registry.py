"""``Registry``: the plugins of this process and what they offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Self

import pluggy

from bmt_core.errors import BmtError, PluginError, unknown_name
from bmt_core.packages import PACKAGES, complaint_about_versions, install_hint
from bmt_core.plugins import hookspecs
from bmt_core.plugins.discovery import (
    DISABLE_VARIABLE,
    choose,
    disabled_by_environment,
    installed_entry_points,
)
from bmt_core.plugins.implementations import implemented_hooks
from bmt_core.plugins.info import PluginInfo, info_of
from bmt_core.plugins.kinds import AXIS, KINDS, check_offers
from bmt_core.settings import MeshAxis, RunSettings

if TYPE_CHECKING:
    import torch

    from bmt_core.ops.provider import KernelProvider
    from bmt_core.plugins.protocols import FileFormat, Run


class Registry:
    """The plugins of this process: the installed ones, which :meth:`load` finds, and those that are
    passed to it.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._infos: dict[str, PluginInfo] = {}
        self._versions: dict[str, str] = {}  # of bmt's packages, also of those that do not load
        self._answers: dict[str, _Answers] = {}
        self.disabled: tuple[str, ...] = ()
        self.problems: list[BmtError] = []

    @classmethod
    def load(cls, *, disabled: Iterable[str] = (), plugins: Iterable[object] = ()) -> Self:
        """Load every installed plugin except those in ``disabled`` and ``BMT_DISABLE_PLUGINS``, and
        add ``plugins``.

        Raises PluginError if one cannot be loaded.
        """
        registry = cls.load_what_works(disabled=disabled)
        _raise_any(registry.problems)
        for plugin in plugins:
            registry._add(plugin, info_of(plugin))
        return registry

    @classmethod
    def load_what_works(cls, *, disabled: Iterable[str] = ()) -> Self:
        """Load the installed plugins like :meth:`load`, but collect the errors in ``problems``."""
        registry = cls()
        registry.disabled = tuple(sorted({*disabled, *disabled_by_environment()}))
        chosen, problems = choose(installed_entry_points(), registry.disabled)
        registry.problems.extend(problems)
        for entry in chosen:
            try:
                registry._load(entry)
            except BmtError as problem:
                registry.problems.append(problem)
        if (complaint := complaint_about_versions(registry._versions)) is not None:
            registry.problems.insert(0, PluginError(complaint))  # others may follow from it
        registry._manager.check_pending()
        return registry

    def register(self, plugin: object, name: str) -> None:
        """Add a module or object of hook implementations under ``name``."""
        self._add(plugin, PluginInfo(name))

    @property
    def kernel_providers(self) -> Mapping[str, type[KernelProvider]]:
        """The kernel providers by name."""
        return self._offers("kernel provider")

    @property
    def optimizers(self) -> Mapping[str, type[torch.optim.Optimizer]]:
        """The optimizers by name."""
        return self._offers("optimizer")

    @property
    def checkpoint_formats(self) -> Mapping[str, type[FileFormat]]:
        """The checkpoint formats by name."""
        return self._offers("checkpoint format")

    def find(self, kind: str, name: str) -> Any:
        """Return the offer of ``kind`` whose name is ``name``.

        ``kind`` is ``"optimizer"``, ``"comm backend"``, ``"kernel provider"``,
        ``"checkpoint format"`` or ``"command"``. Raises PluginError, with the known names, if there
        is none.
        """
        offers = self._offers(kind)
        if name not in offers:
            raise PluginError(unknown_name(kind, name, offers) + install_hint(name))
        return offers[name]

    def mesh_axes(self, settings: RunSettings) -> list[MeshAxis]:
        """Return the axes that plugins add to the grid for ``settings``, sorted by
        (order, name).
        """
        axes, _ = self._ask_for_axes(settings)
        return sorted(axes, key=lambda axis: (axis.order, axis.name))

    def axis_owners(self, settings: RunSettings) -> Mapping[str, str]:
        """Return the plugin of each axis of the grid for ``settings``, by the name of the axis."""
        _, owners = self._ask_for_axes(settings)
        return owners

    def describe(self) -> list[PluginInfo]:
        """Return the infos of all plugins, sorted by name."""
        return [self._infos[name] for name in sorted(self._infos)]

    def names_of(self, plugin: str) -> dict[str, list[str]]:
        """Return the names of the offers of ``plugin`` by kind, without empty kinds."""
        names = {
            kind: [name for name, owner in self._ask(kind).owners.items() if owner == plugin]
            for kind in KINDS
        }
        return {kind: sorted(offered) for kind, offered in names.items() if offered}

    def owners(self, kind: str) -> Mapping[str, str]:
        """Return the plugin of each correct offer of ``kind``, by the name of the offer."""
        return self._ask(kind).owners

    def working(self, kind: str) -> Mapping[str, Any]:
        """Return the correct offers of ``kind`` by name, even if others are wrong."""
        return self._ask(kind).offers

    def doubled(self, kind: str) -> Mapping[str, BmtError]:
        """Return the errors about offers of ``kind`` that two plugins have, by name."""
        return self._ask(kind).doubled

    def examine(self) -> list[BmtError]:
        """Return all errors of loading plugins and of what they offer."""
        return self.problems + [problem for kind in KINDS for problem in self._ask(kind).problems]

    def answers(self, hook: str, **arguments: object) -> dict[str, Any]:
        """Return what each plugin answers to ``hook``, by what messages call the plugin."""
        return {
            self._infos[each.plugin_name].title: self._call(hook, each, **arguments)
            for each in self._implementations(hook)
        }

    def run_started(self, runtime: Run) -> None:
        """Tell every plugin, in name order, that the run has started."""
        for implementation in self._implementations("bmt_run_started"):
            self._call("bmt_run_started", implementation, runtime=runtime)

    def run_stopping(self, runtime: Run) -> None:
        """Tell every plugin, in name order, that the run stops. An error is raised after all have
        been told.
        """
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
            metadata = entry.dist.metadata  # this property parses the file at each access
            info = replace(info, distribution=metadata["Name"], version=metadata["Version"])
            if info.distribution in PACKAGES:
                self._versions[info.distribution] = info.version
        try:
            plugin = entry.load()
        except KeyboardInterrupt:
            raise
        # A script as a plugin may call sys.exit(), which would end this rank without a word.
        except BaseException as error:
            raise PluginError(
                f"The {info.title} cannot be imported from {entry.value}: {type(error).__name__}:"
                f" {error}. Repair or uninstall it, or turn it off: {DISABLE_VARIABLE}={entry.name}"
            ) from error
        self._add(plugin, info)

    def _add(self, plugin: object, info: PluginInfo) -> None:
        if info.name in self._infos:
            raise PluginError(
                f"Two plugins are named {info.name!r}. Give the second an attribute 'name' of"
                " its own."
            )
        if self._manager.is_registered(plugin):
            raise PluginError(
                f"The {info.title} is registered already, as {self._manager.get_name(plugin)!r}."
            )
        hooks = implemented_hooks(self._manager, plugin, info.title)
        self._manager.register(plugin, info.name)
        self._infos[info.name] = replace(info, hooks=hooks)
        self._answers.clear()

    def _ask_for_axes(self, settings: RunSettings) -> tuple[list[MeshAxis], dict[str, str]]:
        owners = {"dp": "bmt-core", "replica": "bmt-core"}  # core's own axes
        axes: list[MeshAxis] = []
        for implementation in self._implementations(AXIS.hook):
            plugin = implementation.plugin_name
            offered = self._call(AXIS.hook, implementation, config=settings)
            for name, axis in check_offers(AXIS, offered, self._infos[plugin].title):
                if name in owners:
                    raise self._doubled(AXIS.name, name, owners[name], plugin)
                owners[name] = plugin
                axes.append(axis)
        return axes, owners

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        return sorted(implementations, key=lambda implementation: implementation.plugin_name)

    def _call(self, hook: str, implementation: pluggy.HookImpl, **arguments: object) -> Any:
        # Not through pluggy, which calls in another order and does not tell which plugin returned
        # a value.
        try:
            return implementation.function(*(arguments[name] for name in implementation.argnames))
        except (BmtError, KeyboardInterrupt):
            raise
        except BaseException as error:
            title = self._infos[implementation.plugin_name].title
            raise PluginError(
                f"The {title} failed in {hook}(): {type(error).__name__}: {error}"
            ) from error

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
        # Those of bmt come first: another plugin cannot replace what they offer.
        for implementation in sorted(
            self._implementations(hook), key=lambda known: known.plugin_name not in PACKAGES
        ):
            plugin = implementation.plugin_name
            try:
                offered = check_offers(
                    KINDS[kind], self._call(hook, implementation), self._infos[plugin].title
                )
            except BmtError as problem:
                answers.problems.append(problem)
                continue
            for name, offer in offered:
                if name in answers.offers:
                    doubled = self._doubled(kind, name, answers.owners[name], plugin)
                    answers.problems.append(doubled)
                    answers.doubled[name] = doubled
                else:
                    answers.offers[name], answers.owners[name] = offer, plugin
        return answers

    def _doubled(self, kind: str, name: str, first: str, second: str) -> PluginError:
        one, other = (
            self._infos.get(plugin, PluginInfo(plugin)).title for plugin in (first, second)
        )
        if first == second:
            return PluginError(f"The {one} offers the {kind} {name!r} twice. Rename one of them.")
        foreign = [plugin for plugin in (first, second) if plugin not in PACKAGES]
        remedy = " or ".join(f"{DISABLE_VARIABLE}={plugin}" for plugin in foreign)
        what = "Turn one of them off"
        if len(foreign) == 1:
            what = f"Rename that of {foreign[0]!r}, or turn it off"
        return PluginError(
            f"The {kind} {name!r} is offered twice: by the {one} and by the {other}."
            f" {what}: {remedy}"
        )


@dataclass(frozen=True)
class _Answers:
    """The answers of all plugins for one kind: offers and the plugins that own them, by name,
    and errors.
    """

    offers: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    problems: list[BmtError] = field(default_factory=list)
    doubled: dict[str, BmtError] = field(default_factory=dict)


def _raise_any(problems: Sequence[BmtError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PluginError("\n".join(str(problem) for problem in problems))
