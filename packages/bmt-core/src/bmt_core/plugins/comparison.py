"""``compare_across_ranks``: check at start, through the rendezvous store, that ranks have the same
plugins and settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from bmt_core.errors import ConfigError, PluginError
from bmt_core.plugins.discovery import DISABLE_VARIABLE
from bmt_core.plugins.info import PluginInfo

if TYPE_CHECKING:
    from torch.distributed import Store

    from bmt_core.plugins.registry import Registry

_VERDICT = "plugins/verdict"
_SAME_PLUGINS = (
    f"Install the same packages, pass the same plugins and set the same {DISABLE_VARIABLE} on"
    " every rank."
)
_SAME_SETTINGS = (
    "Call init_distributed() with the same arguments, in the same environment, on every rank."
)
_OWN_NUMBERS = (
    "All ranks draw one model from the same seed; for numbers of a rank's own, make a"
    " torch.Generator after the start."
)
# Rank 0 starts to wait before others see its report, so a rank that waits this much longer than
# rank 0 gets its verdict.
_MARGIN = 1.0


def compare_across_ranks(
    registry: Registry,
    settings: Mapping[str, str],
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout: float,
) -> None:
    """Raise the same error on every rank unless all ranks have the plugins and the settings
    of rank 0.

    Plugins (names, versions and hooks) raise :class:`PluginError`, settings (texts by name)
    :class:`ConfigError`.

    Collective. ``store`` must be unused, for example a new ``PrefixStore``. Rank 0 alone reads all
    reports and publishes the result, so that the traffic grows with the number of ranks and not
    with its square. The error names ranks that have not reported after ``timeout`` seconds.
    """
    report = RankReport(
        plugins=tuple(registry.describe()), disabled=registry.disabled, settings=settings
    )
    store.set(_report_key(rank), report.to_json())
    if rank == 0:
        verdict = _judge(store, world_size, timeout)
        store.set(_VERDICT, json.dumps(asdict(verdict)))
    else:
        _wait(store, _report_key(0), timeout, "reported no plugins and settings")
        _wait(store, _VERDICT, timeout + _MARGIN, "did not finish comparing plugins and settings")
        verdict = Verdict(**json.loads(store.get(_VERDICT)))
    verdict.raise_error()


@dataclass(frozen=True)
class RankReport:
    """What one rank reports to rank 0."""

    plugins: tuple[PluginInfo, ...]
    disabled: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankReport:
        """Return the report that :meth:`to_json` wrote."""
        data = json.loads(text)
        plugins = tuple(
            PluginInfo(**{**plugin, "hooks": tuple(plugin["hooks"])}) for plugin in data["plugins"]
        )
        return cls(plugins=plugins, disabled=tuple(data["disabled"]), settings=data["settings"])


@dataclass(frozen=True)
class Verdict:
    """What rank 0 found: no difference (an empty text), other ``"plugins"`` or
    other ``"settings"``.
    """

    differing: str = ""
    text: str = ""

    def raise_error(self) -> None:
        """Raise the error, if there is one."""
        if self.text:
            raise (ConfigError if self.differing == "settings" else PluginError)(self.text)


def compare_reports(reports: Sequence[RankReport]) -> Verdict:
    """Return how ranks (the indices of ``reports``) differ from rank 0.

    Settings are compared if the plugins are the same: the axes of the grid, for example, depend on
    the plugins.

    >>> lion = PluginInfo("lion", "bmt-lion", "1.0", ("bmt_optimizers",))
    >>> compare_reports([RankReport((lion,)), RankReport((lion,))]).text
    ''
    >>> compare_reports([RankReport((lion,)), RankReport(()), RankReport(())]).text.splitlines()[0]
    'Ranks 1-2 have other plugins than rank 0: lion is missing.'
    >>> print(compare_reports([RankReport((), settings={"pipe_size": size}) for size in "12"]).text)
    Rank 1 has other settings than rank 0: pipe_size is 2 instead of 1.
    Call init_distributed() with the same arguments, in the same environment, on every rank.
    """
    lines = _lines("plugins", [list(_other_plugins(reports[0], report)) for report in reports])
    if lines:
        return Verdict("plugins", "\n".join([*lines, _SAME_PLUGINS]))
    differences = [
        list(_other_settings(reports[0].settings, report.settings)) for report in reports
    ]
    lines = _lines("settings", differences)
    if not lines:
        return Verdict()
    has_other_seed = any(text.startswith("seed ") for of_rank in differences for text in of_rank)
    return Verdict(
        "settings", "\n".join([*lines, _SAME_SETTINGS, *([_OWN_NUMBERS] if has_other_seed else [])])
    )


def _lines(noun: str, differences: Sequence[Sequence[str]]) -> list[str]:
    """Return one line for each set of differences, with the ranks that have it; none for ranks
    without a difference.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(differences):
        if of_rank:
            ranks_of.setdefault("; ".join(of_rank), []).append(rank)
    return [
        (
            f"{_name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} other {noun} than rank"
            f" 0: {difference}."
        )
        for difference, ranks in ranks_of.items()
    ]


def missing_of(keys: Sequence[str], store: Store, first: int = 0) -> list[int]:
    """Return the indices, counted from ``first``, of the ``keys`` that ``store`` lacks. It asks for
    all, then for halves: about 2 log2(len(keys)) requests for each that is missing.
    """
    if store.check(list(keys)):
        return []
    half = len(keys) // 2
    if half == 0:
        return [first]
    return [*missing_of(keys[:half], store, first), *missing_of(keys[half:], store, first + half)]


def _judge(store: Store, world_size: int, timeout: float) -> Verdict:
    keys = [_report_key(rank) for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
        silent = []
    except RuntimeError:  # a DistError, but for a store in a file
        silent = missing_of(keys, store)
    if silent:
        have = "has" if len(silent) == 1 else "have"
        return Verdict(
            "plugins",
            f"{_name_ranks(silent)} {have} not reported plugins within {timeout:g} s: ended,"
            " hanging or never started. Look at what"
            f" {'it' if len(silent) == 1 else 'they'} printed.",
        )
    return compare_reports([RankReport.from_json(report) for report in store.multi_get(keys)])


def _other_settings(expected: Mapping[str, str], found: Mapping[str, str]) -> Iterable[str]:
    for name in {**expected, **found}:
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is extra"
        elif found[name] != expected[name]:
            yield f"{name} is {found[name]} instead of {expected[name]}"


def _other_plugins(expected: RankReport, found: RankReport) -> Iterable[str]:
    ours, theirs = _by_name(expected.plugins), _by_name(found.plugins)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield f"{name} is missing" + (
                f" (turned off by {DISABLE_VARIABLE})" if name in found.disabled else ""
            )
        elif name not in ours:
            yield f"{name} is extra" + (
                " (rank 0 turned it off)" if name in expected.disabled else ""
            )
        elif theirs[name] != ours[name]:
            yield (
                f"{name} is {_variant(theirs[name], ours[name])} instead of"
                f" {_variant(ours[name], theirs[name])}"
            )


def _by_name(plugins: Iterable[PluginInfo]) -> Mapping[str, PluginInfo]:
    return {plugin.name: plugin for plugin in plugins}


def _variant(plugin: PluginInfo, other: PluginInfo) -> str:
    """Return the most important property in which ``plugin`` differs from ``other``: package,
    version or hooks.
    """
    if plugin.distribution != other.distribution:
        return f"{plugin.distribution or 'an object without a package'} {plugin.version}".rstrip()
    if plugin.version != other.version:
        return f"version {plugin.version}"
    return f"implementing {', '.join(plugin.hooks)}"


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return ``Rank 3`` or ``Ranks 1-3, 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"Rank {text}" if len(ranks) == 1 else f"Ranks {text}"


def _report_key(rank: int) -> str:
    return f"plugins/{rank}"


def _wait(store: Store, key: str, timeout: float, failure: str) -> None:
    try:
        store.wait([key], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise PluginError(
            f"Rank 0 {failure} within {timeout:g} s, or its store is gone: look at what it printed."
        ) from error
