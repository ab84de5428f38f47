"""``RankReport``: the plugins and settings of a rank, which must be the same on all ranks;
``check_reports`` compares them when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bmt_core.errors import ConfigError, PluginError
from bmt_core.plugins.discovery import DISABLE_VARIABLE
from bmt_core.plugins.info import PluginInfo

if TYPE_CHECKING:
    from bmt_core.plugins.registry import Registry

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


@dataclass(frozen=True)
class RankReport:
    """What one rank reports to rank 0."""

    plugins: tuple[PluginInfo, ...]
    disabled: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, registry: Registry, settings: Mapping[str, str]) -> RankReport:
        """Return the report of a rank with the plugins of ``registry``."""
        return cls(tuple(registry.describe()), registry.disabled, settings)

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON can write it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RankReport:
        """Return the report of which :meth:`to_plain` was written as JSON."""
        plugins = tuple(
            PluginInfo(**{**plugin, "hooks": tuple(plugin["hooks"])}) for plugin in data["plugins"]
        )
        return cls(plugins=plugins, disabled=tuple(data["disabled"]), settings=data["settings"])


def check_reports(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`PluginError` unless all ranks have the plugins (names, versions and hooks) of
    rank 0, and :class:`ConfigError` unless they have its settings.

    The indices of ``reports``, from :meth:`RankReport.to_plain`, are the ranks. Settings are
    compared if the plugins are the same: the axes of the grid, for example, depend on the plugins.

    >>> lion = PluginInfo("lion", "bmt-lion", "1.0", ("bmt_optimizers",))
    >>> check_reports([RankReport((lion,)).to_plain()] * 2)
    >>> check_reports([RankReport((), settings={"pipe_size": n}).to_plain() for n in "12"])
    Traceback (most recent call last):
    bmt_core.errors.ConfigError: Rank 1 has other settings than rank 0: pipe_size is 2 instead of 1.
    Call init_distributed() with the same arguments, in the same environment, on every rank.
    """
    first, *others = map(RankReport.from_plain, reports)
    lines = _lines("plugins", [list(_other_plugins(first, report)) for report in others])
    if lines:
        raise PluginError("\n".join([*lines, _SAME_PLUGINS]))
    differences = [list(_other_settings(first.settings, report.settings)) for report in others]
    lines = _lines("settings", differences)
    if any(text.startswith("seed ") for of_rank in differences for text in of_rank):
        raise ConfigError("\n".join([*lines, _SAME_SETTINGS, _OWN_NUMBERS]))
    if lines:
        raise ConfigError("\n".join([*lines, _SAME_SETTINGS]))


def _lines(noun: str, differences: Sequence[Sequence[str]]) -> list[str]:
    """Return one line for each set of ``differences`` of rank 1 and those after it, with the ranks
    that have it; none for ranks without a difference.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(differences, 1):
        if of_rank:
            ranks_of.setdefault("; ".join(of_rank), []).append(rank)
    return [
        (
            f"{_name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} other {noun} than rank"
            f" 0: {difference}."
        )
        for difference, ranks in ranks_of.items()
    ]


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
