from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar

import click
import pytest
import torch

from bmt_core.comm import CommBackend, CommContext, Group, TorchBackend
from bmt_core.comm.observer import RunObserver, only_one
from bmt_core.errors import ConfigError, PluginError
from bmt_core.ops import KernelProvider, choose_kernels
from bmt_core.packages import PACKAGES
from bmt_core.plugins import PluginInfo, Registry, hookspecs
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.bmtrain_names import check_axes_are_provided
from bmt_core.run.topology import check_axis_sizes
from bmt_core.settings import MeshAxis, RunSettings

HOOKS = [name for name in dir(hookspecs) if name.startswith("bmt_")]
REPOSITORY = Path(__file__).parents[3]
Install = Callable[..., None]

OPTIMIZER = """
from bmt_core.plugins.hookspecs import hookimpl
import torch
class Lion(torch.optim.SGD):
    name = "lion"
@hookimpl
def bmt_optimizers():
    return [Lion]
"""


def load_only(*plugins: str) -> Registry:
    """Load the named plugins, whatever else the environment of the test has installed."""
    installed = {entry.name for entry in entry_points(group="bmt")}
    return Registry.load(disabled=installed - set(plugins))


def registry_of(*plugins: object) -> Registry:
    registry = Registry()
    for index, plugin in enumerate(plugins):
        registry.register(plugin, f"plugin-{index}")
    return registry


class Sgd(torch.optim.SGD):
    name: ClassVar[str] = "sgd"


def offering(hook: str, answer: object) -> object:
    """Return a plugin that answers ``hook``, which has no arguments."""

    def implementation(self: object) -> object:
        return answer

    return type("Offers", (), {hook: hookimpl(implementation)})()


def offers_sgd() -> object:
    return offering("bmt_optimizers", [Sgd])


# --- loading ---


def test_core_enters_by_its_entry_point() -> None:
    registry = load_only("bmt-core")
    assert [info.name for info in registry.describe()] == ["bmt-core"]
    assert registry.describe()[0].distribution == "bmt-core"
    assert registry.find("comm backend", "torch") is TorchBackend


def test_installed_plugin_is_found_with_its_distribution_and_hooks(install: Install) -> None:
    install("some-lion", OPTIMIZER, version="2.5")
    registry = load_only("some-lion")
    assert registry.describe() == [PluginInfo("some-lion", "some-lion", "2.5", ("bmt_optimizers",))]
    assert registry.find("optimizer", "lion") is registry.optimizers["lion"]
    assert registry.names_of("some-lion") == {"optimizer": ["lion"]}


def test_plugins_are_loaded_described_and_told_in_the_order_of_their_names(
    install: Install,
) -> None:
    code = """
        from bmt_core.plugins.hookspecs import hookimpl
        @hookimpl
        def bmt_run_started(runtime):
            runtime.append(__name__.split("_")[0])
    """
    for name in ("zebra", "ape", "mouse"):
        install(name, code)
    assert [entry.name for entry in entry_points(group="bmt")][:3] == ["mouse", "ape", "zebra"], (
        "as they are found"
    )
    registry = load_only("zebra", "ape", "mouse")
    told: list[str] = []
    registry.run_started(told)  # type: ignore[arg-type]
    assert told == ["ape", "mouse", "zebra"]
    assert [info.name for info in registry.describe()] == ["ape", "mouse", "zebra"]
    imported = [
        name.split("_")[0]
        for name in sys.modules
        if name.split("_")[0] in ("ape", "mouse", "zebra")
    ]
    assert imported == ["ape", "mouse", "zebra"]


def test_import_error_names_plugin_distribution_and_cause(install: Install) -> None:
    install("broken-lion", "import no_such_module_of_bmt", plugin="lion", version="3.0")
    with pytest.raises(PluginError) as caught:
        load_only("lion")
    message = str(caught.value)
    assert "plugin 'lion' (broken-lion 3.0)" in message
    assert "ModuleNotFoundError: No module named 'no_such_module_of_bmt'" in message
    assert "BMT_DISABLE_PLUGINS=lion" in message
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_all_broken_plugins_are_reported_at_once(install: Install) -> None:
    install("first-broken", "1 / 0")
    install("second-broken", "this is no python")
    with pytest.raises(
        PluginError, match=r"(?s)first-broken.*ZeroDivisionError.*second-broken.*SyntaxError"
    ):
        load_only("first-broken", "second-broken")


def test_load_what_works_keeps_the_others(install: Install) -> None:
    install("some-lion", OPTIMIZER)
    install("broken", "1 / 0")
    installed = {entry.name for entry in entry_points(group="bmt")}
    registry = Registry.load_what_works(disabled=installed - {"some-lion", "broken"})
    assert list(registry.working("optimizer")) == ["lion"]
    assert len(registry.examine()) == 1


def test_disabled_plugin_is_not_even_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("broken", "1 / 0")
    install("also-broken", "1 / 0")
    monkeypatch.setenv("BMT_DISABLE_PLUGINS", " broken , also-broken ")
    assert {"broken", "also-broken"} <= set(load_only("bmt-core").disabled)


def test_unknown_disabled_plugin_is_an_error_that_lists_the_known(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("some-lion", OPTIMIZER)
    monkeypatch.setenv("BMT_DISABLE_PLUGINS", "some-loin")
    with pytest.raises(
        PluginError, match=r"BMT_DISABLE_PLUGINS.*'some-loin'.*Did you mean 'some-lion'\?.*bmt-core"
    ):
        load_only("bmt-core", "some-lion")


def test_two_distributions_with_one_plugin_name_are_an_error_naming_both(install: Install) -> None:
    install("lion-of-a", OPTIMIZER, plugin="lion")
    install("lion-of-b", OPTIMIZER, plugin="lion")
    with pytest.raises(
        PluginError, match=r"'lion', of lion-of-a 1.0 and lion-of-b 1.0.*BMT_DISABLE_PLUGINS=lion"
    ):
        load_only("lion")


def test_core_plugin_is_there_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a frozen program: nothing on the path has metadata, and the modules are importable all
    # the same.
    monkeypatch.setattr(sys, "path", [])
    assert [info.name for info in Registry.load().describe()] == ["bmt-core"]
    assert Registry.load().find("comm backend", "torch") is TorchBackend


# --- rules of implementations ---


class Defaults:
    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings | None = None) -> list[MeshAxis]:
        return []


class Misnamed:
    @hookimpl
    def bmt_mesh_axes(self, settings: RunSettings) -> list[MeshAxis]:
        return []


class Unmarked:
    def bmt_optimizers(self) -> list[type]:
        return []


class First:
    @hookimpl(tryfirst=True)
    def bmt_optimizers(self) -> list[type]:
        return []


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Defaults(), r"'config' of bmt_mesh_axes\(\) a default value.*bmt_mesh_axes\(config\)"),
        (offering("bmt_optimisers", []), r"'bmt_optimisers'. Did you mean 'bmt_optimizers'"),
        (Misnamed(), r"settings.*in bmt_mesh_axes\(\), which takes \(config\)"),
        (Unmarked(), r"bmt_optimizers\(\) without @hookimpl"),
        (First(), "tryfirst in bmt_optimizers"),
        (object(), "implements no hook"),
    ],
)
def test_implementations_that_break_a_rule_are_refused(plugin: object, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        registry_of(plugin)


def test_same_name_or_same_object_twice_is_refused() -> None:
    registry, plugin = Registry(), offers_sgd()
    registry.register(plugin, "a")
    with pytest.raises(PluginError, match="Two plugins are named 'a'"):
        registry.register(offers_sgd(), "a")
    with pytest.raises(PluginError, match="registered already, as 'a'"):
        registry.register(plugin, "b")


# --- what is offered ---


def test_name_offered_by_two_plugins_is_an_error_naming_both_and_the_way_out(
    install: Install,
) -> None:
    install("lion-of-a", OPTIMIZER)
    install("lion-of-b", OPTIMIZER)
    registry = load_only("lion-of-a", "lion-of-b")
    with pytest.raises(PluginError) as caught:
        _ = registry.optimizers
    assert "optimizer 'lion'" in str(caught.value)
    assert "'lion-of-a' (lion-of-a 1.0)" in str(caught.value)
    assert "BMT_DISABLE_PLUGINS=lion-of-a or BMT_DISABLE_PLUGINS=lion-of-b" in str(caught.value)
    assert load_only("lion-of-b").find("optimizer", "lion").__module__.startswith("lion_of_b")


def test_name_offered_twice_by_one_plugin_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"optimizer 'sgd' twice"):
        registry_of(offering("bmt_optimizers", [Sgd, Sgd])).find("optimizer", "sgd")


def test_unknown_name_gets_the_nearest_and_all_known() -> None:
    with pytest.raises(PluginError) as caught:
        registry_of(offers_sgd()).find("optimizer", "sdg")
    assert str(caught.value) == "No optimizer is named 'sdg'. Did you mean 'sgd'? Known: sgd."


def test_what_a_missing_package_offers_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(
            PluginError,
            match=r"'nccl-native' is provided by bmt-kernels, which is not installed.*kernels",
        ):
            load_only("bmt-core").find("comm backend", "nccl-native")
        with pytest.raises(
            ConfigError, match=r"BMT_KERNELS=cpu: .*'cpu' is provided by bmt-kernels"
        ):
            choose_kernels({}, torch.device("cpu"), "cpu")


def test_names_that_packages_are_said_to_offer_are_theirs() -> None:
    registry = Registry.load_what_works()
    installed = {info.name for info in registry.describe()}
    for name, package in PACKAGES.items():
        if name in installed - {"bmt-core"}:
            theirs = [offer for offers in registry.names_of(name).values() for offer in offers]
            assert set(theirs) == set(package.offers)


def test_unknown_kind_is_our_callers_mistake() -> None:
    with pytest.raises(ValueError, match=r"'optimiser'. Did you mean 'optimizer'"):
        Registry().find("optimiser", "sgd")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"must return a list from bmt_optimizers\(\), it returned None"),
        ([int], "must return subclasses of Optimizer"),
        ([Sgd([torch.zeros(1)], lr=1)], "must return subclasses of Optimizer"),
        ([torch.optim.SGD], "needs an attribute 'name'"),
    ],
)
def test_wrong_answer_is_an_error_that_names_the_plugin(answer: object, message: str) -> None:
    with pytest.raises(PluginError, match=f"plugin 'plugin-0' .*{message}"):
        _ = registry_of(offering("bmt_optimizers", answer)).optimizers


def test_abstract_class_is_an_error_that_says_what_is_missing() -> None:
    class Unfinished(CommBackend):
        name = "unfinished"

        def close(self) -> None: ...

    registry = registry_of(offering("bmt_comm_backends", [Unfinished]))
    with pytest.raises(PluginError, match="does not implement: new_group"):
        registry.find("comm backend", "torch")


def test_raising_hook_is_an_error_that_names_plugin_and_cause() -> None:
    class Raises:
        @hookimpl
        def bmt_optimizers(self) -> list[type]:
            raise RuntimeError("no licence")

    with pytest.raises(
        PluginError,
        match=r"plugin 'plugin-0' failed in bmt_optimizers\(\): RuntimeError: no licence",
    ) as caught:
        _ = registry_of(Raises()).optimizers
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_interrupting_a_plugin_is_no_error_of_the_plugin(install: Install) -> None:
    install("some-lion", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_only("some-lion")


def test_each_kind_is_asked_once() -> None:
    asked: list[int] = []

    class Counts:
        @hookimpl
        def bmt_optimizers(self) -> list[type]:
            asked.append(1)
            return [Sgd]

    registry = registry_of(Counts())
    assert asked == []
    for _ in range(3):
        registry.find("optimizer", "sgd")
    assert len(asked) == 1


# --- one test per hook ---


class Axes:
    def __init__(self, *axes: MeshAxis) -> None:
        self.axes = axes

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis(axis.name, axis.size * config.tp_size, axis.order) for axis in self.axes]


def test_hook_bmt_mesh_axes() -> None:
    registry = registry_of(
        Axes(MeshAxis("tp", 1, 100), MeshAxis("b", 1, 7)),
        Axes(MeshAxis("a", 1, 7), MeshAxis("z", 1, 0)),
    )
    axes = registry.mesh_axes(RunSettings(tp_size=2))
    assert [(axis.name, axis.size) for axis in axes] == [("z", 2), ("a", 2), ("b", 2), ("tp", 2)]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (RunSettings(tp_size=2), "Install bmt-tp: "),
        (RunSettings(pipe_size=2), "Install bmt-pipeline: "),
    ],
)
def test_axis_that_nobody_provides_names_the_package(settings: RunSettings, advice: str) -> None:
    axes = registry_of(offers_sgd()).mesh_axes(settings)
    assert axes == []
    with pytest.raises(ConfigError, match=f"size=2 needs the axis.*{advice}.*bmt_mesh_axes"):
        check_axes_are_provided(settings, axes)
    check_axes_are_provided(RunSettings(), axes)


class ExpertAxis:
    """Adds an axis whose size the settings say, or one of a size of its own."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis("ep", self.size or config.axis_sizes.get("ep", 1), 80)]


def test_a_plugin_reads_the_size_of_its_axis_in_the_settings() -> None:
    for sizes in ({"ep": 4}, {"ep": 1}, {}):
        axes = registry_of(ExpertAxis()).mesh_axes(RunSettings(axis_sizes=sizes))
        assert [axis.size for axis in axes] == [sizes.get("ep", 1)]
        check_axis_sizes(sizes, axes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"sp": 2},
            (
                "the axis 'sp' of size 2, which no active plugin provides.*The axes of this run:"
                " dp, ep"
            ),
        ),
        ({"ep": 3}, "the axis 'ep' of size 3, and its plugin provides it in size 2"),
        ({"dp": 2}, "The axis 'dp' takes the ranks that the others leave"),
    ],
)
def test_sizes_of_axes_that_cannot_be_are_refused(sizes: dict[str, int], message: str) -> None:
    axes = registry_of(ExpertAxis(2)).mesh_axes(RunSettings(axis_sizes=sizes))
    with pytest.raises(ConfigError, match=message):
        check_axis_sizes(sizes, axes)


def test_an_axis_of_one_rank_needs_no_plugin() -> None:
    check_axis_sizes({"sp": 1}, [])


def test_the_sizes_of_tp_and_pp_are_arguments() -> None:
    for name, argument in (("tp", "tp_size"), ("pp", "pipe_size")):
        with pytest.raises(
            ConfigError, match=f"The size of the axis '{name}' is the argument {argument}"
        ):
            check_axes_are_provided(RunSettings(axis_sizes={name: 2}), [])
    with pytest.raises(ConfigError, match=r"axis_sizes\['ep'\] must be at least 1, not 0"):
        RunSettings(axis_sizes={"ep": 0})


@pytest.mark.parametrize("name", ["tp", "dp"])
def test_doubled_axis_is_an_error(name: str) -> None:
    with pytest.raises(PluginError, match=f"axis '{name}' is offered twice"):
        registry_of(Axes(MeshAxis("tp", 1, 0)), Axes(MeshAxis(name, 1, 0))).mesh_axes(RunSettings())


def test_error_of_a_package_about_its_settings_arrives_unchanged() -> None:
    class Refuses:
        @hookimpl
        def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
            raise ConfigError("tp_size must be even")

    with pytest.raises(ConfigError, match=r"^tp_size must be even$"):
        registry_of(Refuses()).mesh_axes(RunSettings())


def test_hook_bmt_comm_backends() -> None:
    class Loopback(CommBackend):
        name = "loopback"

        def new_group(self, partition: object) -> Group:
            raise NotImplementedError

        def close(self) -> None: ...

    registry = registry_of(offering("bmt_comm_backends", [Loopback]))
    backend = registry.find("comm backend", "loopback")
    context = CommContext(
        rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), store=None, timeout=1.0
    )
    assert backend(context).context is context


def test_hook_bmt_kernel_providers() -> None:
    class Fast(KernelProvider):
        name = "fast"
        device_type = "cpu"

        def available(self) -> str | None:
            return None

    registry = registry_of(offering("bmt_kernel_providers", [Fast]))
    assert registry.kernel_providers == {"fast": Fast}


def test_hook_bmt_optimizers() -> None:
    assert registry_of(offers_sgd()).optimizers == {"sgd": Sgd}


def test_hook_bmt_checkpoint_formats() -> None:
    class Format:
        name = "mine"

    registry = registry_of(offering("bmt_checkpoint_formats", [Format]))
    assert registry.checkpoint_formats == {"mine": Format}


def test_hook_bmt_cli_commands() -> None:
    command = click.Command("greet")

    registry = registry_of(offering("bmt_cli_commands", [command]))
    assert registry.working("command") == {"greet": command}


class Notes:
    def __init__(self, notes: list[str], name: str, *, fails: bool = False) -> None:
        self.notes, self.name, self.fails = notes, name, fails

    def _note(self, runtime: object) -> None:
        self.notes.append(f"{self.name} {runtime}")
        if self.fails:
            raise RuntimeError("disk full")

    @hookimpl
    def bmt_run_started(self, runtime: object) -> None:
        self._note(runtime)

    @hookimpl
    def bmt_run_stopping(self, runtime: object) -> None:
        self._note(runtime)


class Observes:
    """Offers an observer of its own, or none."""

    def __init__(self, observer: RunObserver | None) -> None:
        self.observer = observer

    @hookimpl
    def bmt_run_observer(self, context: object) -> RunObserver | None:
        return self.observer


def observer_of(*plugins: object) -> RunObserver:
    return only_one(registry_of(*plugins).answers("bmt_run_observer", context=None))


def test_hook_bmt_run_observer() -> None:
    own, other = RunObserver(), RunObserver()
    assert observer_of(Observes(None), Observes(own)) is own
    assert observer_of(Observes(None)).failure is None
    left: list[str] = []
    own.leave = left.append  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="only one may: the plugin 'plugin-0' and the plugin 'pl"):
        observer_of(Observes(own), Observes(other))
    assert left == [""]


def test_hook_bmt_run_started() -> None:
    notes: list[str] = []
    registry_of(Notes(notes, "a"), Notes(notes, "b")).run_started("run")  # type: ignore[arg-type]
    assert notes == ["a run", "b run"]


def test_hook_bmt_run_stopping() -> None:
    notes: list[str] = []
    registry = registry_of(Notes(notes, "a", fails=True), Notes(notes, "b"))
    with pytest.raises(
        PluginError, match=r"plugin 'plugin-0' failed in bmt_run_stopping.*disk full"
    ):
        registry.run_stopping("run")  # type: ignore[arg-type]
    assert notes == ["a run", "b run"], "the second plugin must be told although the first failed"


def test_plugins_added_by_hand_are_told_in_the_order_of_their_names_too() -> None:
    notes: list[str] = []
    registry = Registry()
    for name in ("b", "a", "c"):
        registry.register(Notes(notes, name), name)
    registry.run_started("run")  # type: ignore[arg-type]
    assert notes == ["a run", "b run", "c run"]
    assert [info.name for info in registry.describe()] == ["a", "b", "c"]


def test_every_hook_has_a_test() -> None:
    tests = {
        node.name
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert [hook for hook in HOOKS if f"test_hook_{hook}" not in tests] == []


def test_every_hook_has_a_section_with_its_exact_signature() -> None:
    headings = re.findall(
        r"^## `(.*)`$", (REPOSITORY / "docs" / "hooks.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(headings) == [_signature(hook) for hook in HOOKS]


def _signature(hook: str) -> str:
    signature = inspect.signature(getattr(hookspecs, hook))
    arguments = ", ".join(
        f"{name}: {parameter.annotation}" for name, parameter in signature.parameters.items()
    )
    return f"{hook}({arguments}) -> {signature.return_annotation}"
