"""Which plugins are found: those that are installed when a run starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import bmt_core
from bmt_core.errors import PluginError
from bmt_core.plugins.discovery import installed_entry_points


def installed_names() -> set[str]:
    return {entry.name for entry in installed_entry_points()}


def test_a_plugin_that_is_installed_or_removed_while_the_process_runs_counts_at_the_next_start(
    install: Callable[..., None], tmp_path: Path
) -> None:
    install("bmt-sgd", "")
    assert "bmt-later" not in installed_names()
    metadata = tmp_path / "bmt-sgd" / "bmt_later-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bmt-later\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[bmt]\nbmt-later = bmt_later\n")
    assert {"bmt-later", "bmt-sgd"} <= installed_names()
    shutil.rmtree(metadata)
    assert "bmt-later" not in installed_names()


IMPLEMENTS_A_HOOK = """
from bmt_core.plugins.hookspecs import hookimpl
@hookimpl
def bmt_optimizers():
    return []
"""


@pytest.mark.parametrize("code", [IMPLEMENTS_A_HOOK, "import bmt_core.of_the_other_version"])
def test_packages_of_bmt_in_two_versions_are_an_error_at_the_start(
    code: str, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, others = version("bmt-core"), installed_names() - {"bmt-core"}
    monkeypatch.setenv("BMT_DISABLE_PLUGINS", ",".join(others))
    install("bmt-hf", code, version="99.0")
    with pytest.raises(
        PluginError,
        match=rf"^Packages of bmt .* in several versions: bmt-core {own}, bmt-hf 99\.0\..*"
        r" Type: pip install bmt-core==99\.0 bmt-hf==99\.0",
    ):
        bmt_core.init_distributed(device="cpu")
