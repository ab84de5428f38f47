"""The site of docs/ builds without a warning, loads nothing from elsewhere, and its reference has
every public name.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import site_hooks
from bmtrain._table import TABLE

ROOT = Path(__file__).parents[2]
PACKAGES = ["checkpoint", "core", "hf", "optim", "pipeline", "testing", "tp", "zero"]
# Modules of the facade whose names the reference shows; the others repeat them for BMTrain's sake.
FACADE = ["benchmark", "distributed", "inspect", "loss", "lr_scheduler", "nn", "optim"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    output = built.stdout + built.stderr
    assert built.returncode == 0, output
    assert "WARNING" not in output, output
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    documents = [*(ROOT / "docs").rglob("*.md"), *map(ROOT.joinpath, site_hooks.outside_pages())]
    assert len(documents) > 30
    for document in documents:
        path = document.relative_to(ROOT).as_posix().removeprefix("docs/")
        page = path.removesuffix(".md").replace("README", "index") + ".html"
        assert (site / page).exists(), page


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\s>]*"
    )
    for page in site.rglob("*.html"):
        assert loaded.findall(page.read_text()) == [], page


def test_reference_pages_have_signatures_and_docstrings(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "blocks.html").read_text())
    for part in ("bmt.Block", "use_checkpoint: bool = True", "by ZeRO, as one unit"):
        assert part in text
    run = re.sub(r"<[^>]+>|\s+", " ", (site / "reference" / "run.html").read_text())
    assert "Return when host and device of every rank" in run
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert "&gt;&gt;&gt;" in pages  # examples are code, not quotations
    assert "<blockquote>" not in pages
    assert ":class:" not in pages


def test_the_reference_has_every_public_name() -> None:
    shown = {
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    shown |= {site_hooks.SHOWN_BY[name] for name in shown & site_hooks.SHOWN_BY.keys()}
    modules = ["bmtrain", *(f"bmtrain.{module}" for module in FACADE)]
    expected = {
        f"{module}.{name}": home for module in modules for name, home in TABLE[module].items()
    }
    assert sorted(name for name in expected if name not in shown) == []
    shown |= {f"{home.module}.{home.attribute}" for home in expected.values()}
    for package in PACKAGES:
        module = importlib.import_module(f"bmt_{package}")
        missing = [
            name
            for name in module.__all__
            if f"{module.__name__}.{name}" not in shown and name != "lr_scheduler"
        ]
        assert missing == [], package
