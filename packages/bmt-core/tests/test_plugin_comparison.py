"""Ranks compare their plugins when a run starts: other plugins on another rank are an error."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from bmt_core.errors import PluginError
from bmt_core.plugins import PluginInfo, Registry, compare_across_ranks
from bmt_core.plugins.comparison import RankPlugins, describe_differences
from bmt_core.plugins.hookspecs import hookimpl


class Plugin:
    @hookimpl
    def bmt_optimizers(self) -> list[type]:
        return []


def registry_with(*plugins: object) -> Registry:
    registry = Registry()
    for index, plugin in enumerate(plugins):
        registry.register(plugin, f"plugin-{index}")
    return registry


def compare(registries: list[Registry | None], timeout: float = 10.0) -> list[str]:
    """Compare as ranks that share a store; None is a rank that never comes. Return each rank's error, "" without one."""
    store: Store = HashStore()

    def one_rank(rank: int) -> str:
        registry = registries[rank]
        if registry is None:
            return "absent"
        try:
            compare_across_ranks(registry, store=store, rank=rank, world_size=len(registries), timeout=timeout)
        except PluginError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(registries)) as executor:
        return list(executor.map(one_rank, range(len(registries))))


def test_equal_plugins_pass_on_every_rank() -> None:
    assert compare([registry_with(Plugin()) for _ in range(4)]) == [""] * 4


def test_missing_plugin_is_the_same_error_on_every_rank() -> None:
    errors = compare([registry_with(Plugin())] * 3 + [registry_with()])
    assert len(set(errors)) == 1
    assert errors[0].startswith("Rank 3 has other plugins than rank 0: plugin-0 is missing.")


def test_rank_that_never_comes_is_named_within_the_timeout() -> None:
    errors = compare([registry_with(), registry_with(), None, None], timeout=0.5)
    assert errors[0] == errors[1]
    assert errors[0].startswith("Ranks 2-3 have not reported plugins within 0.5 s")


def test_rank_0_that_never_comes_does_not_hang_the_others() -> None:
    errors = compare([None, registry_with()], timeout=0.3)
    assert errors[1].startswith("Rank 0 reported no plugins within 0.3 s")


LION = PluginInfo("lion", "bmt-lion", "1.0", ("bmt_optimizers",))


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "difference"),
    [
        (RankPlugins(()), RankPlugins((LION,)), "lion is extra."),
        (RankPlugins((), ("lion",)), RankPlugins((LION,)), "lion is extra (rank 0 turned it off)."),
        (RankPlugins((LION,)), RankPlugins((), ("lion",)), "lion is missing (turned off by BMT_DISABLE_PLUGINS)."),
        (
            RankPlugins((LION,)),
            RankPlugins((PluginInfo("lion", "bmt-lion", "1.1", LION.hooks),)),
            "lion is version 1.1 instead of version 1.0.",
        ),
        (
            RankPlugins((LION,)),
            RankPlugins((PluginInfo("lion", "lion-fork", "1.0", LION.hooks),)),
            "lion is lion-fork 1.0 instead of bmt-lion 1.0.",
        ),
        (
            RankPlugins((LION,)),
            RankPlugins((PluginInfo("lion", "bmt-lion", "1.0", ("bmt_cli_commands",)),)),
            "lion is implementing bmt_cli_commands instead of implementing bmt_optimizers.",
        ),
    ],
)
def test_difference_says_what_is_other(rank_0: RankPlugins, rank_1: RankPlugins, difference: str) -> None:
    message = describe_differences([rank_0, rank_1]).splitlines()[0]
    assert message == f"Rank 1 has other plugins than rank 0: {difference}"


names = st.sampled_from(["ape", "bee", "cat"])
infos = st.builds(
    PluginInfo,
    names,
    names,
    st.sampled_from(["1", "2"]),
    st.tuples(st.sampled_from(["bmt_mesh_axes", "bmt_optimizers"])),
)
rank_plugins = st.builds(
    RankPlugins,
    plugins=st.lists(infos, max_size=3, unique_by=lambda info: info.name).map(tuple),
    disabled=st.lists(names, max_size=2).map(tuple),
)


@given(st.lists(rank_plugins, min_size=1, max_size=6))
def test_exactly_the_ranks_that_differ_from_rank_0_are_named(reports: list[RankPlugins]) -> None:
    named: set[int] = set()
    for line in describe_differences(reports).splitlines():
        if head := re.match(r"Ranks? ([\d, -]+) ha", line):
            for span in head[1].split(", "):
                first, _, last = span.partition("-")
                named.update(range(int(first), int(last or first) + 1))
    expected = [set(report.plugins) for report in reports]
    assert named == {rank for rank, plugins in enumerate(expected) if plugins != expected[0]}


@given(rank_plugins)
def test_report_survives_the_store(report: RankPlugins) -> None:
    assert RankPlugins.from_json(report.to_json()) == report
