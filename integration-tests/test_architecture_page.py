"""``docs/architecture.md`` has one sentence for each folder of the packages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def folders() -> set[str]:
    """Return the folders of all packages that have modules, as they are imported."""
    sources = [source for source in ROOT.glob("packages/*/src") if source.is_dir()]
    return {
        path.parent.relative_to(source).as_posix()
        for source in sources
        for path in source.rglob("*.py")
    }


def test_each_folder_has_one_line() -> None:
    rows = re.findall(r"^\| `(\w+(?:/\w+)*)` \| \S", PAGE, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == folders()


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(bmt\w+(?:/\w+)*\.py)`", PAGE))
    assert named
    missing = {each for each in named if not list(ROOT.glob(f"packages/*/src/{each}"))}
    assert not missing
