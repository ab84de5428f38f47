"""``bmt doctor``: check what decides whether a run works and how fast it is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import click
import torch
import torch.distributed
from rich.console import Console

from bmt_core.cli.output import make_console, make_table, styled
from bmt_core.errors import BmtError
from bmt_core.ops import OPERATIONS, KernelProvider, Kernels, by_priority, choose_kernels
from bmt_core.ops.kernel_choice import VARIABLE as KERNELS_VARIABLE
from bmt_core.ops.kernels import REFERENCE_NAME
from bmt_core.packages import PACKAGES, Package
from bmt_core.plugins import Registry
from bmt_core.run.bmtrain_names import argument_for, settings_of_all_axes
from bmt_core.run.topology import DATA_AXIS
from bmt_core.settings import DEFAULT_COMM_BACKEND, RunSettings
from bmtrain._program.environment import Machine, describe_launcher, examine_environment
from bmtrain._program.requirements import unmet_requirements

_PROBLEMS = ("error", "warning")
_MISSING = "not installed"
_STYLES = {"ok": "green", "error": "bold red", "warning": "yellow", "advice": "cyan"}


@click.command()
@click.option("--all", "shows_all", is_flag=True, help="Print everything that was looked at.")
@click.option("--json", "as_json", is_flag=True, help="Print everything, as JSON.")
def doctor(shows_all: bool, as_json: bool) -> None:
    """Find what is broken or slow in this installation, and say what to do.

    Looks at torch, the device, bmt's packages, communication backends, kernels, plugins, the axes
    of the rank grid and environment variables. Prints errors, warnings and a summary.

    Exit status 1 when something cannot work; warnings leave it 0.
    """
    report = Report()
    registry = Registry.load_what_works()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _report_software(report, device)
    _report_packages(report)
    _report_comm_backends(report, registry)
    _report_kernels(report, registry, device)
    _report_plugins(report, registry)
    _report_grid(report, registry)
    _report_environment(report, device)
    _report_defaults(report, device)
    if as_json:
        click.echo(report.json())
    else:
        report.print(make_console(), shows_all=shows_all)
    if report.count("error"):
        raise SystemExit(1)


class Report:
    """Collects tables, and knows which of their rows are problems."""

    def __init__(self) -> None:
        self._tables: list[_Rows] = []
        self.software: list[str] = []
        """What the summary says of the installation."""

    def table(
        self, title: str, rows: Sequence[Sequence[str]], columns: Sequence[str] = ("", "")
    ) -> None:
        """Add rows of text. A cell that is the name of a severity is counted and coloured."""
        self._tables.append(_Rows(title, columns, rows))

    def count(self, severity: str) -> int:
        """Return how many rows have ``severity``."""
        return sum(severity in row for table in self._tables for row in table.rows)

    def print(self, console: Console, *, shows_all: bool) -> None:
        """Print all tables, or the rows with errors and warnings; then a summary."""
        for table in self._tables:
            rows = table.rows if shows_all else table.problems
            if rows:
                printed = make_table(table.title, *table.columns)
                for row in rows:
                    printed.add_row(*(styled(cell, _STYLES.get(cell, "")) for cell in row))
                console.print(printed)
        console.print(styled(self._summary(), "bold"))
        if not shows_all:
            advice = self.count("advice")
            said = f", and advice: {advice}" if advice else ""
            console.print(styled(f"bmt doctor --all shows everything that was looked at{said}."))

    def json(self) -> str:
        """Return everything as JSON: ``errors`` and ``warnings`` are numbers of rows."""
        tables = [
            {"title": table.title, "columns": list(table.columns), "rows": [*map(list, table.rows)]}
            for table in self._tables
        ]
        counts = {f"{severity}s": self.count(severity) for severity in _PROBLEMS}
        return json.dumps({**counts, "summary": self._summary(), "tables": tables}, indent=2)

    def _summary(self) -> str:
        counts = [
            f"{count} {severity}{'s' if count > 1 else ''}"
            for severity in _PROBLEMS
            if (count := self.count(severity))
        ]
        found = " and ".join(counts) + "." if counts else "No problem found."
        installed = "; ".join([f"bmt {_version_of('bmt-core')}", *self.software])
        return f"{found} {installed}."


class _Rows(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def problems(self) -> list[Sequence[str]]:
        return [row for row in self.rows if any(severity in row for severity in _PROBLEMS)]


def _report_software(report: Report, device: torch.device) -> None:
    rows = [
        ("python", f"{platform.python_version()} on {sys.platform} ({platform.machine()})"),
        ("torch", torch.version.__version__),
        ("device", _describe_device(device)),
        ("engines", ", ".join(_engines())),
        ("launcher", describe_launcher(os.environ)),
    ]
    report.table("Software and device", rows)
    report.software = [f"torch {torch.version.__version__}", _describe_device(device)]


def _describe_device(device: torch.device) -> str:
    if device.type == "cpu":
        reason = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no usable GPU"
        )
        return f"cpu, {_usable_cores()} cores ({reason})"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"cuda {torch.version.cuda}: {kinds}"


def _engines() -> list[str]:
    distributed = torch.distributed
    if not distributed.is_available():
        return ["none: this torch is built without torch.distributed"]
    checks: dict[str, Callable[[], bool]] = {
        "gloo": distributed.is_gloo_available,
        "nccl": distributed.is_nccl_available,
    }
    engines = [name for name, is_available in checks.items() if is_available()]
    if "nccl" in engines and torch.cuda.is_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        engines[engines.index("nccl")] = f"nccl {'.'.join(map(str, version))}"
    return engines


def _report_packages(report: Report) -> None:
    rows = [(name, *_package_state(name, package)) for name, package in PACKAGES.items()]
    report.table("Packages of bmt", rows, ("package", "", ""))
    missing = [name for name, state, text in rows if not state and text.startswith(_MISSING)]
    if missing:
        report.software.append(f"without {', '.join(missing)}")


def _package_state(name: str, package: Package) -> tuple[str, str]:
    core, own = _version_of("bmt-core"), _version_of(name)
    if name == "bmt-train" and (others := _version_of("bmtrain")) is not None:
        return (
            "error",
            (
                f"BMTrain {others} (bmtrain on the index) is installed too, and has the same import"
                f" name. Type: pip uninstall bmtrain bmt-train; then {package.install}"
            ),
        )
    if importlib.util.find_spec(package.module) is None:
        return "", f"{_MISSING}: {package.provides}. Install it with: {package.install}"
    if own is None:
        return (
            "warning",
            (
                f"{package.module} can be imported but {name} is not installed, so bmt does not"
                " find its plugin."
            ),
        )
    if own != core:
        return (
            "error",
            f"version {own}, beside bmt-core {core}. Install one version of all packages.",
        )
    return "ok", own


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _report_comm_backends(report: Report, registry: Registry) -> None:
    chosen = os.environ.get("BMT_COMM_BACKEND") or DEFAULT_COMM_BACKEND
    rows = [
        (
            name,
            "ok" if name == chosen else "",
            "chosen for a run" if name == chosen else "installed",
        )
        for name in sorted(registry.working("comm backend"))
    ]
    try:
        registry.find("comm backend", chosen)
    except BmtError as problem:
        rows.append((chosen, "error", str(problem)))
    report.table("Communication backends", rows, ("name", "", ""))


def _report_kernels(report: Report, registry: Registry, device: torch.device) -> None:
    rows: list[tuple[str, ...]] = []
    active: dict[str, list[str]] = {}
    providers = registry.working("kernel provider")
    try:
        active = _operations_by_provider(choose_kernels(providers, device))
    except BmtError as problem:
        rows.append((os.environ.get(KERNELS_VARIABLE, ""), "", "error", str(problem)))
    owners = registry.owners("kernel provider")
    for provider in by_priority(providers.values()):
        name = provider.name
        rows.append((name, owners[name], *_kernel_state(provider, active.get(name), device)))
    if REFERENCE_NAME in active:
        why = _why_reference(active[REFERENCE_NAME], providers)
        rows.append((REFERENCE_NAME, "bmt-core", "ok", f"active on {device.type}: {why}"))
    report.software.append(f"kernels {', '.join(active) or 'unknown'}")
    report.table(
        "Kernels, in the order in which they are asked", rows, ("provider", "plugin", "", "")
    )


def _operations_by_provider(kernels: Kernels) -> dict[str, list[str]]:
    by_provider: dict[str, list[str]] = {}
    for operation in OPERATIONS:
        provider = kernels.provider_of.get(operation)
        by_provider.setdefault(provider.name if provider else REFERENCE_NAME, []).append(operation)
    return by_provider


def _why_reference(operations: Sequence[str], providers: Collection[str]) -> str:
    if len(operations) < len(OPERATIONS):
        return f"plain torch, for what no provider has: {', '.join(operations)}"
    if os.environ.get(KERNELS_VARIABLE):
        return f"plain torch, as {KERNELS_VARIABLE} asks"
    return "plain torch, the fallback" + (
        "" if providers else "; no package with compiled kernels is installed"
    )


def _kernel_state(
    provider: type[KernelProvider], active_for: list[str] | None, device: torch.device
) -> tuple[str, str]:
    if active_for:
        what = "everything" if len(active_for) == len(OPERATIONS) else ", ".join(active_for)
        return "ok", f"active on {device.type} for {what}"
    if provider.device_type != device.type:
        return "", f"is for {provider.device_type}, and runs here use {device.type}"
    if reason := provider().available():
        return "warning", f"cannot be used: {reason}"
    return "", "usable; all that it has comes from other providers"


def _report_plugins(report: Report, registry: Registry) -> None:
    rows: list[tuple[str, ...]] = []
    for info in registry.describe():
        unmet = list(unmet_requirements(info.distribution)) if info.distribution else []
        remedy = ". Install what it needs, or another version of it." if unmet else ""
        state = "; ".join([f"{info.distribution} {info.version}".strip(), *unmet]) + remedy
        rows.append((info.name, "error" if unmet else "ok", state))
    rows += [(name, "", "turned off by BMT_DISABLE_PLUGINS") for name in registry.disabled]
    rows += [("", "error", str(problem)) for problem in registry.examine()]
    report.table("Plugins", rows, ("plugin", "", ""))


def _report_grid(report: Report, registry: Registry) -> None:
    rows = [(DATA_AXIS.name, "", "the ranks that the other axes leave")]
    try:
        always = {axis.name for axis in registry.mesh_axes(RunSettings()) if axis.size > 1}
        for axis in registry.mesh_axes(settings_of_all_axes()):
            asked_by = "axis_sizes" if axis.size == 1 else argument_for(axis.name)
            in_words = "in every run" if axis.name in always else f"asked for by {asked_by}"
            rows.append((axis.name, "", in_words))
    except BmtError as problem:
        rows.append(("", "error", str(problem)))
    report.table("Axes of the rank grid", rows, ("axis", "", ""))


def _report_environment(report: Report, device: torch.device) -> None:
    findings = examine_environment(
        os.environ, Machine(cores=_usable_cores(), device_type=device.type)
    )
    rows: list[tuple[str, ...]] = [
        (item.variable, item.severity, item.effect, item.remedy) for item in findings
    ]
    nothing = [("", "ok", "Nothing in it hurts.", "")]
    report.table("Environment", rows or nothing, ("variable", "", "what it does", "what to do"))


def _report_defaults(report: Report, device: torch.device) -> None:
    """Say which settings that make a step faster no run has by itself, and why."""
    if device.type == "cuda" and importlib.util.find_spec("bmt_optim") is not None:
        what = (
            "The first Blocks of the next forward pass begin while later ones are updated. Not by"
            " default, because a program that reads parameters after a step must call"
            " optimizer.wait() before."
        )
        rows = [("AdamW(..., overlap_forward=True)", "advice", what)]
        report.table("Faster steps, if you ask for them", rows, ("write", "", "what it does"))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
