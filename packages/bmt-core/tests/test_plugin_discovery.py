"""Which plugins are found: those that are installed when a run starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

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
