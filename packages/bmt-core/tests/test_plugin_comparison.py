"""Ranks compare their plugins and settings when a run starts: others on another rank are
an error.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore, Store

from bmt_core.errors import BmtError, ConfigError, PluginError
from bmt_core.plugins import PluginInfo, Registry
from bmt_core.plugins.comparison import RankReport, check_reports
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run import start_section as start_section_module
from bmt_core.run.start_section import start_section


class Plugin:
    @hookimpl
    def bmt_optimizers(self) -> list[type]:
        return []


def registry_with(*plugins: object) -> Registry:
    registry = Registry()
    for index, plugin in enumerate(plugins):
        registry.register(plugin, f"plugin-{index}")
    return registry


def compare(
    registries: list[Registry | None], timeout: float = 10.0, stores: list[Store] | None = None
) -> list[str]:
    """Compare as ranks that share a store; None is a rank that never comes. Return each rank's
    error, "" without one.
    """
    shared = [HashStore()] * len(registries) if stores is None else stores

    def one_rank(rank: int) -> str:
        registry = registries[rank]
        if registry is None:
            return "absent"
        try:
            with start_section(
                "settings and plugins",
                shared[rank],
                rank=rank,
                world_size=len(registries),
                timeout=timeout,
                judge=check_reports,
            ) as reports:
                reports.own = RankReport.of(registry, {}).to_plain()
        except BmtError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(registries)) as executor:
        return list(executor.map(one_rank, range(len(registries))))


def test_equal_plugins_pass_on_every_rank() -> None:
    assert compare([registry_with(Plugin()) for _ in range(4)]) == [""] * 4


def test_missing_plugin_is_the_same_error_on_every_rank() -> None:
    errors = compare([registry_with(Plugin())] * 3 + [registry_with()])
    assert len(set(errors)) == 1
    assert errors[0].startswith(
        "PluginError: Rank 3 has other plugins than rank 0: plugin-0 is missing."
    )


def test_rank_that_never_comes_is_named_within_the_timeout() -> None:
    errors = compare([registry_with(), registry_with(), None, None], timeout=1.0)
    assert errors[0] == errors[1]
    assert errors[0].startswith("RemoteError: After 1 s these ranks have not started: 2, 3.")


def test_rank_0_that_never_comes_does_not_hang_the_others() -> None:
    errors = compare([None, registry_with()], timeout=0.3)
    assert errors[1].startswith("RemoteError: After 0.3 s these ranks have not started: 0.")


def test_rank_0_that_reports_and_says_no_more_does_not_hang_the_others() -> None:
    store = HashStore()
    store.set("start/settings and plugins/0", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_section_module, "_MARGIN", 0.1)
        errors = compare([None, registry_with()], timeout=0.3, stores=[store] * 2)
    assert errors[1].startswith("RemoteError: Rank 0 does not say whether all ranks have started.")


def test_a_report_that_rank_0_cannot_read_is_an_error_on_every_rank() -> None:
    store = HashStore()
    store.set("start/settings and plugins/2", '[null, {"of": "another version"}]')
    errors = compare([registry_with(), registry_with(), None], stores=[store] * 3)
    assert (
        errors[0]
        == errors[1]
        == "RemoteError: Rank 0 cannot compare the ranks: KeyError: 'plugins'"
    )


def test_a_verdict_that_comes_after_the_timeout_is_waited_for() -> None:
    """Rank 0 may have begun to wait for a third one when the others' time is almost over."""
    store = HashStore()
    store.set("start/settings and plugins/0", "")

    def says_late(rank: int) -> str:
        if rank == 1:
            return compare([None, registry_with()], timeout=0.3, stores=[store] * 2)[1]
        time.sleep(0.45)
        store.set("start/settings and plugins/verdict", '[["", "RemoteError", "late"], null]')
        return ""

    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(says_late, range(2)))[1] == "RemoteError: late"


def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    registries: list[Registry | None] = [registry_with(Plugin()), registry_with(Plugin()), None]

    def files(name: str, ranks: int) -> list[Store]:
        return [FileStore(str(tmp_path / name), ranks) for _ in range(ranks)]

    assert compare(registries[:2], stores=files("both", 2)) == [""] * 2
    errors = compare(registries, timeout=1.0, stores=files("one lacks", 3))
    assert errors[0] == errors[1]
    assert errors[0].startswith("RemoteError: After 1 s these ranks have not started: 2.")


def error_of(*reports: RankReport) -> BmtError | None:
    try:
        check_reports([json.loads(json.dumps(report.to_plain())) for report in reports])
    except BmtError as error:
        return error
    return None


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
    error = error_of(rank_0, rank_1)
    assert isinstance(error, PluginError)
    assert str(error).splitlines()[0] == f"Rank 1 has other plugins than rank 0: {difference}"


def test_settings_that_differ_are_named_with_the_ranks_and_both_values() -> None:
    settings: list[dict[str, str]] = [{"tp_size": "1", "seed": "0"}, {"tp_size": "2", "seed": "0"}]
    settings += [{"tp_size": "1", "seed": "5", "the axis 'ep'": "of size 2"}] * 2
    error = error_of(*[RankReport((), settings=of_rank) for of_rank in settings])
    assert isinstance(error, ConfigError)
    assert str(error).splitlines()[:2] == [
        "Rank 1 has other settings than rank 0: tp_size is 2 instead of 1.",
        (
            "Ranks 2-3 have other settings than rank 0: seed is 5 instead of 0; the axis 'ep'"
            " is extra."
        ),
    ]
    assert "make a torch.Generator" in str(error)


def test_settings_are_not_compared_between_ranks_with_other_plugins() -> None:
    """The settings of a run depend on its plugins, so that their differences would hide what
    is wrong.
    """
    error = error_of(RankReport((LION,), settings={"a": "1"}), RankReport((), settings={"a": "2"}))
    assert isinstance(error, PluginError) and "lion is missing" in str(error)
    assert "settings" not in str(error)


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
    for line in str(error_of(*reports) or "").splitlines():
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
    assert RankReport.from_plain(json.loads(json.dumps(report.to_plain()))) == report
