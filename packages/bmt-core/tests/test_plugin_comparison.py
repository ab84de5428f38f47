"""Ranks compare their plugins and settings when a run starts: others on another rank are
an error.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from bmt_core.errors import ConfigError, PluginError
from bmt_core.plugins import PluginInfo, Registry, compare_across_ranks
from bmt_core.plugins.comparison import RankReport, compare_reports
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
    """Compare as ranks that share a store; None is a rank that never comes. Return each rank's
    error, "" without one.
    """
    store: Store = HashStore()

    def one_rank(rank: int) -> str:
        registry = registries[rank]
        if registry is None:
            return "absent"
        try:
            compare_across_ranks(
                registry, {}, store=store, rank=rank, world_size=len(registries), timeout=timeout
            )
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
    assert errors[1].startswith("Rank 0 reported no plugins and settings within 0.3 s")


LION = PluginInfo("lion", "bmt-lion", "1.0", ("bmt_optimizers",))


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "difference"),
    [
        (RankReport(()), RankReport((LION,)), "lion is extra."),
        (RankReport((), ("lion",)), RankReport((LION,)), "lion is extra (rank 0 turned it off)."),
        (
            RankReport((LION,)),
            RankReport((), ("lion",)),
            "lion is missing (turned off by BMT_DISABLE_PLUGINS).",
        ),
        (
            RankReport((LION,)),
            RankReport((PluginInfo("lion", "bmt-lion", "1.1", LION.hooks),)),
            "lion is version 1.1 instead of version 1.0.",
        ),
        (
            RankReport((LION,)),
            RankReport((PluginInfo("lion", "lion-fork", "1.0", LION.hooks),)),
            "lion is lion-fork 1.0 instead of bmt-lion 1.0.",
        ),
        (
            RankReport((LION,)),
            RankReport((PluginInfo("lion", "bmt-lion", "1.0", ("bmt_cli_commands",)),)),
            "lion is implementing bmt_cli_commands instead of implementing bmt_optimizers.",
        ),
    ],
)
def test_difference_says_what_is_other(
    rank_0: RankReport, rank_1: RankReport, difference: str
) -> None:
    message = compare_reports([rank_0, rank_1]).text.splitlines()[0]
    assert message == f"Rank 1 has other plugins than rank 0: {difference}"


def test_settings_that_differ_are_named_with_the_ranks_and_both_values() -> None:
    settings: list[dict[str, str]] = [{"tp_size": "1", "seed": "0"}, {"tp_size": "2", "seed": "0"}]
    settings += [{"tp_size": "1", "seed": "5", "the axis 'ep'": "of size 2"}] * 2
    verdict = compare_reports([RankReport((), settings=of_rank) for of_rank in settings])
    with pytest.raises(ConfigError) as caught:
        verdict.raise_error()
    assert str(caught.value).splitlines()[:2] == [
        "Rank 1 has other settings than rank 0: tp_size is 2 instead of 1.",
        (
            "Ranks 2-3 have other settings than rank 0: seed is 5 instead of 0; the axis 'ep'"
            " is extra."
        ),
    ]
    assert "make a torch.Generator" in str(caught.value)


def test_settings_are_not_compared_between_ranks_with_other_plugins() -> None:
    """The settings of a run depend on its plugins, so that their differences would hide what
    is wrong.
    """
    verdict = compare_reports(
        [RankReport((LION,), settings={"a": "1"}), RankReport((), settings={"a": "2"})]
    )
    with pytest.raises(PluginError, match="lion is missing"):
        verdict.raise_error()
    assert "settings" not in verdict.text


names = st.sampled_from(["ape", "bee", "cat"])
infos = st.builds(
    PluginInfo,
    names,
    names,
    st.sampled_from(["1", "2"]),
    st.tuples(st.sampled_from(["bmt_mesh_axes", "bmt_optimizers"])),
)
rank_plugins = st.builds(
    RankReport,
    plugins=st.lists(infos, max_size=3, unique_by=lambda info: info.name).map(tuple),
    disabled=st.lists(names, max_size=2).map(tuple),
    settings=st.dictionaries(names, names, max_size=2),
)


@given(st.lists(rank_plugins, min_size=1, max_size=6))
def test_exactly_the_ranks_that_differ_from_rank_0_are_named(reports: list[RankReport]) -> None:
    named: set[int] = set()
    for line in compare_reports(reports).text.splitlines():
        if head := re.match(r"Ranks? ([\d, -]+) ha", line):
            for span in head[1].split(", "):
                first, _, last = span.partition("-")
                named.update(range(int(first), int(last or first) + 1))
    expected: list[object] = [set(report.plugins) for report in reports]
    if all(plugins == expected[0] for plugins in expected):
        expected = [report.settings for report in reports]
    assert named == {rank for rank, has in enumerate(expected) if has != expected[0]}


@given(rank_plugins)
def test_report_survives_the_store(report: RankReport) -> None:
    assert RankReport.from_json(report.to_json()) == report
