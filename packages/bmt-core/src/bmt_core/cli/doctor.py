"""``bmt doctor``: check what decides whether a run works and how fast it is."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence

import click
import torch
import torch.distributed
from rich.console import Console

from bmt_core.cli.environment import Machine, examine_environment
from bmt_core.cli.output import make_console, make_table, styled
from bmt_core.errors import BmtError
from bmt_core.ops import KernelProvider, choose_kernels
from bmt_core.plugins import Registry
from bmt_core.run.bmtrain_names import argument_for, settings_of_all_axes
from bmt_core.run.topology import DATA_AXIS
from bmt_core.settings import DEFAULT_COMM_BACKEND, RunSettings

_STYLES = {"ok": "green", "error": "bold red", "warning": "yellow", "advice": "cyan"}


@click.command()
def doctor() -> None:
    """Look for what is broken or slow, and say what to do.

    Reports on torch, device, communication backends, kernels, plugins, the axes of the rank grid and environment variables.
    Exit status 1 when something cannot work; warnings leave it 0.
    """
    report = Report(make_console())
    registry = Registry.load_what_works()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _report_software(report, device)
    _report_comm_backends(report, registry)
    _report_kernels(report, registry, device)
    _report_plugins(report, registry)
    _report_grid(report, registry)
    _report_environment(report, device)
    report.finish()


class Report:
    """Prints tables, counts errors and warnings, and ends the program with the status that follows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._counts = {"error": 0, "warning": 0}

    def table(self, title: str, rows: Sequence[Sequence[str]], columns: Sequence[str] = ("", "")) -> None:
        """Print rows of text. A cell that is the name of a severity is counted and coloured."""
        table = make_table(title, *columns)
        for row in rows:
            for severity in self._counts.keys() & set(row):
                self._counts[severity] += 1
            table.add_row(*(styled(cell, _STYLES.get(cell, "")) for cell in row))
        self._console.print(table)

    def finish(self) -> None:
        """Print the number of errors and warnings, and exit with status 1 if there was an error."""
        counts = [f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in self._counts.items() if count]
        self._console.print(styled(" and ".join(counts) + "." if counts else "No problem found.", "bold"))
        if self._counts["error"]:
            raise SystemExit(1)


def _report_software(report: Report, device: torch.device) -> None:
    rows = [
        ("python", f"{platform.python_version()} on {sys.platform} ({platform.machine()})"),
        ("torch", torch.version.__version__),
        ("device", _describe_device(device)),
        ("engines", ", ".join(_engines())),
    ]
    report.table("Software and device", rows)


def _describe_device(device: torch.device) -> str:
    if device.type == "cpu":
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
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


def _report_comm_backends(report: Report, registry: Registry) -> None:
    chosen = os.environ.get("BMT_COMM_BACKEND") or DEFAULT_COMM_BACKEND
    rows = [
        (name, "ok" if name == chosen else "", "chosen for a run" if name == chosen else "installed")
        for name in sorted(registry.working("comm backend"))
    ]
    try:
        registry.find("comm backend", chosen)
    except BmtError as problem:
        rows.append((chosen, "error", str(problem)))
    report.table("Communication backends", rows, ("name", "", ""))


def _report_kernels(report: Report, registry: Registry, device: torch.device) -> None:
    rows: list[tuple[str, ...]] = []
    active = None
    providers = registry.working("kernel provider")
    try:
        active = choose_kernels(providers, device).provider_name
    except BmtError as problem:
        rows.append((os.environ.get("BMT_KERNELS", ""), "error", str(problem)))
    for name, provider in sorted(providers.items()):
        rows.append((name, "ok" if name == active else "", _kernel_state(provider, name == active, device)))
    if active is not None and active not in providers:
        why = "plain torch, as BMT_KERNELS asks" if os.environ.get("BMT_KERNELS") else "plain torch, the fallback"
        none = "" if providers else "; no package with compiled kernels is installed"
        rows.append((active, "ok", f"active on {device.type}: {why}{none}"))
    report.table("Kernels", rows, ("provider", "", ""))


def _kernel_state(provider: type[KernelProvider], is_active: bool, device: torch.device) -> str:
    if is_active:
        return f"active on {device.type}"
    if provider.device_type != device.type:
        return f"is for {provider.device_type}, and runs here use {device.type}"
    reason = provider().available()
    return f"cannot be used: {reason}" if reason else "usable; another provider was chosen"


def _report_plugins(report: Report, registry: Registry) -> None:
    rows: list[tuple[str, ...]] = [
        (info.name, "ok", f"{info.distribution} {info.version}".strip()) for info in registry.describe()
    ]
    rows += [(name, "", "turned off by BMT_DISABLE_PLUGINS") for name in registry.disabled]
    rows += [("", "error", str(problem)) for problem in registry.examine()]
    report.table("Plugins", rows, ("plugin", "", ""))


def _report_grid(report: Report, registry: Registry) -> None:
    rows = [(DATA_AXIS.name, "", "the ranks that the other axes leave")]
    try:
        always = {axis.name for axis in registry.mesh_axes(RunSettings())}
        for axis in registry.mesh_axes(settings_of_all_axes()):
            in_words = "in every run" if axis.name in always else f"asked for by {argument_for(axis.name)}"
            rows.append((axis.name, "", in_words))
    except BmtError as problem:
        rows.append(("", "error", str(problem)))
    report.table("Axes of the rank grid", rows, ("axis", "", ""))


def _report_environment(report: Report, device: torch.device) -> None:
    findings = examine_environment(os.environ, Machine(cores=_usable_cores(), device_type=device.type))
    rows: list[tuple[str, ...]] = [(item.variable, item.severity, item.effect, item.remedy) for item in findings]
    nothing = [("", "ok", "Nothing in it hurts.", "")]
    report.table("Environment", rows or nothing, ("variable", "", "what it does", "what to do"))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
