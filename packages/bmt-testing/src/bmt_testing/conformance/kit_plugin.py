"""The pytest side of the conformance kits: options, the offers that tests get, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

PACKAGE = __package__
_RULE = "bmt rule"
_OFFERS = pytest.StashKey[dict[str, list[Any]]]()


@dataclass(frozen=True, kw_only=True)
class _Kit:
    """A kit, which is one test file: its option, and what its tests import besides bmt-core."""

    kind: str
    module: str
    option: str
    packages: tuple[str, ...] = ()

    @property
    def destination(self) -> str:
        """The option's name in pytest's configuration."""
        return self.option.lstrip("-").replace("-", "_")


_KITS = (
    _Kit(
        kind="optimizer",
        module=f"{PACKAGE}.test_optimizer",
        option="--bmt-optimizer",
        packages=("bmt-optim", "bmt-zero"),
    ),
    _Kit(
        kind="comm backend",
        module=f"{PACKAGE}.test_comm_backend",
        option="--bmt-comm-backend",
    ),
    _Kit(
        kind="checkpoint format",
        module=f"{PACKAGE}.test_checkpoint_format",
        option="--bmt-checkpoint-format",
        packages=("bmt-checkpoint",),
    ),
    _Kit(
        kind="kernel provider",
        module=f"{PACKAGE}.test_kernels",
        option="--bmt-kernels",
    ),
    _Kit(
        kind="axis",
        module=f"{PACKAGE}.test_axis",
        option="--bmt-axis",
        packages=("bmt-optim", "bmt-zero"),
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for each kit."""
    group = parser.getgroup("bmt", "conformance kits (pytest --pyargs bmt_testing.conformance)")
    for kit in _KITS:
        group.addoption(
            kit.option,
            action="append",
            default=[],
            metavar="NAME",
            help=f"test this {kit.kind}; may be given several times",
        )
    group.addoption(
        "--bmt-optimizer-options",
        default="{}",
        metavar="JSON",
        help='options of its constructor, such as {"lr": 0.01}',
    )
    group.addoption(
        "--bmt-plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module with hook implementations that is not installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse names that no plugin offers, before anything is collected."""
    if any(_names_asked(config, kit) for kit in _KITS):
        from bmt_core.errors import BmtError

        try:
            for kit in _KITS:
                if _names_asked(config, kit):
                    _check_packages(kit)
                    for offer in _offers(config, kit):
                        offer.find()
        except BmtError as error:
            raise pytest.UsageError(" ".join(str(error).split())) from error


@pytest.hookimpl(tryfirst=True)  # so that the offer is the first part of each test's id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a kit with each offer that was asked for, or with all that are installed."""
    kit = _kit_of(metafunc.module.__name__)
    if kit is not None and "offer" in metafunc.fixturenames:
        offers = [
            pytest.param(offer, id=offer.name, marks=[pytest.mark.gpu] * offer.needs_gpu)
            for offer in _offers(metafunc.config, kit)
        ]
        metafunc.parametrize("offer", offers, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out kits that were not asked for, and note the rule of each test for the report."""
    is_asked = {kit.module: bool(_names_asked(config, kit)) for kit in _KITS}
    if not any(is_asked.values()):
        return
    chosen, left_out = [], []
    for item in items:
        kit = _kit_of(getattr(getattr(item, "module", None), "__name__", ""))
        if kit is None or not is_asked[kit.module] or not isinstance(item, pytest.Function):
            left_out.append(item)
            continue
        offer: Any = item.callspec.params["offer"]
        case = item.callspec.id.removeprefix(offer.name).lstrip("-")
        number = list(vars(item.module)).index(item.originalname)
        item.user_properties.append((_RULE, (offer.title, number, _sentence(item), case)))
        chosen.append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table of rules and results, in Markdown."""
    reports = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and _RULE in dict(report.user_properties)
    ]
    for line in _table(reports):
        terminalreporter.write_line(line)


def _kit_of(module: str) -> _Kit | None:
    return next((kit for kit in _KITS if kit.module == module), None)


def _names_asked(config: pytest.Config, kit: _Kit) -> list[str]:
    names: list[str] = config.getoption(kit.destination)
    return names


def _offers(config: pytest.Config, kit: _Kit) -> list[Any]:
    """Return what ``kit`` tests. Asked for every test, and found once: that loads all plugins."""
    found = config.stash.setdefault(_OFFERS, {})
    if kit.kind not in found:
        found[kit.kind] = _find_offers(config, kit)
    return found[kit.kind]


def _find_offers(config: pytest.Config, kit: _Kit) -> list[Any]:
    from bmt_testing.conformance.offer import Offer, names_of

    plugins = tuple(config.getoption("bmt_plugin"))
    names = _names_asked(config, kit) or names_of(kit.kind, plugins)
    options = _options(config) if kit.kind == "optimizer" else {}
    return [Offer(kind=kit.kind, name=name, plugins=plugins, options=options) for name in names]


def _options(config: pytest.Config) -> dict[str, Any]:
    text = config.getoption("bmt_optimizer_options")
    try:
        options = json.loads(text)
    except ValueError as error:
        raise pytest.UsageError(f"--bmt-optimizer-options is no JSON, {text!r}: {error}") from error
    if not isinstance(options, dict):
        raise pytest.UsageError(
            f'--bmt-optimizer-options is a JSON object such as {{"lr": 0.01}}, not {text!r}.'
        )
    return options


def _check_packages(kit: _Kit) -> None:
    from bmt_testing.trainings import require

    for package in kit.packages:
        require(package, kit.option)


def _sentence(item: pytest.Function) -> str:
    words = item.originalname.removeprefix("test_").replace("_", " ")
    return words[0].upper() + words[1:]


def _table(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return the lines of one table for each offer, with the rules in the order of their file."""
    cases: dict[str, dict[tuple[int, str], dict[str, str]]] = {}
    for report in reports:
        properties: dict[str, Any] = dict(report.user_properties)
        title, number, rule, case = properties[_RULE]
        results = cases.setdefault(title, {}).setdefault((number, rule), {})
        if report.when == "call" or report.outcome != "passed":
            results[case] = _outcome(report)
    lines = []
    for title, rules in cases.items():
        lines += ["", f"{title[0].upper()}{title[1:]}:", "", "| rule | result |", "|---|---|"]
        for (_, rule), results in sorted(rules.items()):
            lines.append(f"| {rule} | {_result(list(results.items()))} |")
    return lines


def _outcome(report: pytest.TestReport) -> str:
    """Return the outcome, that of a skipped test with its reason."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
    return report.outcome


def _result(cases: Sequence[tuple[str, str]]) -> str:
    """Return ``passes``, ``fails``, ``passes (cpu)`` or ``fails (bfloat16)`` if other cases have
    another result, or ``skipped`` with the reason.
    """
    for outcome, word in (("failed", "fails"), ("passed", "passes")):
        own = [case for case, found in cases if found == outcome]
        if own:
            return word + (f" ({', '.join(own)})" if len(own) < len(cases) else "")
    return cases[0][1]
