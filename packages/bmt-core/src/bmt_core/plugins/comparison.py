"""``compare_across_ranks``: check at the start, through the rendezvous store, that all ranks have the same plugins."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError

from bmt_core.errors import PluginError
from bmt_core.plugins.discovery import DISABLE_VARIABLE
from bmt_core.plugins.info import PluginInfo

if TYPE_CHECKING:
    from torch.distributed import Store

    from bmt_core.plugins.registry import Registry

_VERDICT = "plugins/verdict"
# Rank 0 starts to wait before others see its report, so a rank that waits this much longer than rank 0 gets its verdict.
_MARGIN = 1.0


def compare_across_ranks(registry: Registry, *, store: Store, rank: int, world_size: int, timeout: float) -> None:
    """Raise the same PluginError on every rank unless all ranks have the plugins of rank 0: names, versions and hooks.

    Collective. ``store`` must be unused, for example a new ``PrefixStore``. Rank 0 alone reads all reports and publishes the
    result, so that the traffic grows with the number of ranks and not with its square. The error names ranks that have not
    reported after ``timeout`` seconds.
    """
    report = RankPlugins(plugins=tuple(registry.describe()), disabled=registry.disabled)
    store.set(_report_key(rank), report.to_json())
    if rank == 0:
        verdict = _judge(store, world_size, timeout)
        store.set(_VERDICT, verdict)
    else:
        _wait(store, _report_key(0), timeout, "reported no plugins")
        _wait(store, _VERDICT, timeout + _MARGIN, "did not finish comparing plugins")
        verdict = store.get(_VERDICT).decode()
    if verdict:
        raise PluginError(verdict)


@dataclass(frozen=True)
class RankPlugins:
    """What one rank reports to rank 0."""

    plugins: tuple[PluginInfo, ...]
    disabled: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankPlugins:
        """Return the report that :meth:`to_json` wrote."""
        data = json.loads(text)
        plugins = tuple(PluginInfo(**{**plugin, "hooks": tuple(plugin["hooks"])}) for plugin in data["plugins"])
        return cls(plugins=plugins, disabled=tuple(data["disabled"]))


def describe_differences(reports: Sequence[RankPlugins]) -> str:
    """Return a text that says how ranks (the indices of ``reports``) differ from rank 0, or an empty text.

    >>> lion = PluginInfo("lion", "bmt-lion", "1.0", ("bmt_optimizers",))
    >>> describe_differences([RankPlugins((lion,)), RankPlugins((lion,))])
    ''
    >>> print(describe_differences([RankPlugins((lion,)), RankPlugins(()), RankPlugins(())]))
    Ranks 1-2 have other plugins than rank 0: lion is missing.
    Install the same packages, pass the same plugins and set the same BMT_DISABLE_PLUGINS on every rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        difference = "; ".join(_differences(reports[0], report))
        if difference:
            ranks_of.setdefault(difference, []).append(rank)
    if not ranks_of:
        return ""
    lines = [
        f"{_name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} other plugins than rank 0: {difference}."
        for difference, ranks in ranks_of.items()
    ]
    advice = f"Install the same packages, pass the same plugins and set the same {DISABLE_VARIABLE} on every rank."
    return "\n".join([*lines, advice])


def _judge(store: Store, world_size: int, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    silent = [rank for rank in range(world_size) if not _arrives(store, _report_key(rank), deadline)]
    if silent:
        have = "has" if len(silent) == 1 else "have"
        return (
            f"{_name_ranks(silent)} {have} not reported plugins within {timeout:g} s: ended, hanging or never started. "
            f"Look at what {'it' if len(silent) == 1 else 'they'} printed."
        )
    return describe_differences([RankPlugins.from_json(store.get(_report_key(rank))) for rank in range(world_size)])


def _differences(expected: RankPlugins, found: RankPlugins) -> Iterable[str]:
    ours, theirs = _by_name(expected.plugins), _by_name(found.plugins)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield f"{name} is missing" + (f" (turned off by {DISABLE_VARIABLE})" if name in found.disabled else "")
        elif name not in ours:
            yield f"{name} is extra" + (" (rank 0 turned it off)" if name in expected.disabled else "")
        elif theirs[name] != ours[name]:
            yield f"{name} is {_variant(theirs[name], ours[name])} instead of {_variant(ours[name], theirs[name])}"


def _by_name(plugins: Iterable[PluginInfo]) -> Mapping[str, PluginInfo]:
    return {plugin.name: plugin for plugin in plugins}


def _variant(plugin: PluginInfo, other: PluginInfo) -> str:
    """Return the most important property in which ``plugin`` differs from ``other``: package, version or hooks."""
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


def _arrives(store: Store, key: str, deadline: float) -> bool:
    if store.check([key]):
        return True
    # Not 0, which would mean no limit. A rank whose report is there counts even after the deadline.
    seconds = max(0.001, deadline - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=seconds))
    except DistError:
        return False
    return True


def _wait(store: Store, key: str, timeout: float, failure: str) -> None:
    try:
        store.wait([key], timedelta(seconds=timeout))
    except DistError as error:
        raise PluginError(
            f"Rank 0 {failure} within {timeout:g} s, or its store is gone: look at what it printed."
        ) from error
