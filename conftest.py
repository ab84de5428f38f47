"""Settings of all tests."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

Install = Callable[..., None]

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("bmt", deadline=None)
settings.load_profile("bmt")

# For each connection to a store torch asks for the name of ::ffff:127.0.0.1, which /etc/hosts does
# not have. Where the name server leaves a question unanswered now and then, a start would wait 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install distributions as pip would: module and metadata, each in a directory of its own on
    ``sys.path``, last one first.
    """

    def install_one(
        distribution: str,
        code: str,
        *,
        plugin: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> None:
        directory = tmp_path / distribution
        module = f"{distribution}_of_{tmp_path.name}".replace("-", "_")
        metadata = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (directory / f"{module}.py").write_text(textwrap.dedent(code))
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}"
        )
        (metadata / "entry_points.txt").write_text(f"[bmt]\n{plugin or distribution} = {module}\n")
        monkeypatch.syspath_prepend(str(directory))

    return install_one
