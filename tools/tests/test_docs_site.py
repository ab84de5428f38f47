"""The site of docs/ builds without a warning, loads nothing from elsewhere, and its reference has
every public name.
"""

from __future__ import annotations

import html
import importlib
import json
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


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_every_page_is_in_one_of_four_tabs_under_a_title_of_its_own() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    tabs = re.findall(r"^  - (.*):$", navigation, re.MULTILINE)
    assert tabs == ["Tutorials", "How-to", "Reference", "Explanation"]
    entries = re.findall(r"^ +- (.*): (\S+\.md)$", navigation, re.MULTILINE)
    titles, pages = zip(*entries, strict=True)
    assert len({*titles}) > 45
    # The pages of a package's reference have titles of how-to pages, which they are about.
    others = [title for title, page in entries if not page.startswith("reference/")]
    assert len({*others}) == len(others) and len({*pages}) == len(pages)
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert {*pages} == documents | {*site_hooks.outside_pages()}


def test_the_search_finds_users_pages_and_not_those_of_maintainers(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {each["location"].partition("#")[0] for each in index["docs"]}
    assert {"first-training.html", "troubleshooting.html", "reference/run.html"} <= found
    hidden = {page.replace(".md", ".html") for page in site_hooks.NOT_SEARCHED}
    assert len(hidden) == 2 and not hidden & found
    assert all((site / page).exists() for page in hidden)
    first = {each["location"]: each.get("boost") for each in index["docs"]}
    assert first["checkpoints.html"] == 2 and first["reference/checkpoints.html"] is None


def test_a_wrong_address_leads_home(site: Path) -> None:
    page = (site / "404.html").read_text()
    assert "There is no such page" in page
    targets = re.findall(r'<li><a href="/([^"]+)">', page)
    assert "index.html" in targets and all((site / target).exists() for target in targets)


def test_pages_have_the_style_for_the_dark_and_for_phones(site: Path) -> None:
    assert 'href="assets/site.css"' in (site / "index.html").read_text()
    style = (site / "assets" / "site.css").read_text()
    assert "invert" in style and "max-width" in style


def test_signatures_show_values_and_arguments_stand_one_by_one(site: Path) -> None:
    page = text_of(site / "reference" / "run.html")
    signature = page.partition("init_distributed(\n")[2].partition("-> None")[0]
    for argument in ("timeout: float = 1800.0,", 'gradients: GradientsOfRanks = "sum",'):
        assert argument in signature
    items = re.findall(r"<li>\s*(?:<p>)?<code>(\w+)", (site / "reference/run.html").read_text())
    names = re.findall(r"^    (\w+):", signature, re.MULTILINE)
    assert len(names) > 15 and {*names} <= {*items}


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
