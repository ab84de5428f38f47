"""Hooks of mkdocs: pages of the site that lie outside of ``docs/``, and links to what is no page.

Documents link each other as files of the repository, so that links work where the files are read.
In the site the READMEs of two examples are pages too. A link to any other file, such as a test,
becomes the name of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("examples/gpt/README.md", "examples/hf/README.md")
# Pages for those who change bmt itself: the search of users does not find them.
NOT_SEARCHED = ("architecture.md", "decisions.md")
# Their pages say how to do something: the search shows them before those that only mention it.
FIRST_TABS = ("Tutorials", "How-to")
LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)"
)
OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
# Names whose docstring stands elsewhere: the class of an object, and a function like a module.
SHOWN_BY = {
    "bmt_zero.gathered_memory": "bmt_zero.GatheredMemory",
    "bmtrain.config": "bmtrain.global_var.RunConfig",
    "bmtrain.synchronize": "bmt_core.synchronize",
}
FENCE = re.compile(r"^(```.*?^```[^\n]*)", re.DOTALL | re.MULTILINE)


def outside_pages(root: Path = ROOT) -> list[str]:
    """Return the paths from ``root`` of documents outside of ``docs/`` that are pages."""
    return [path for path in OUTSIDE if (root / path).exists()]


def site_links(markdown: str, source: str, pages: set[str]) -> str:
    """Return ``markdown`` of the file ``source`` with links between files as links between pages.

    ``source`` and ``pages`` are paths from the root of the repository.

    >>> pages = {"docs/index.md", "docs/hooks.md", "packages/a/README.md"}
    >>> site_links("[Package a](../packages/a/README.md#use)", "docs/hooks.md", pages)
    '[Package a](packages/a/README.md#use)'
    >>> site_links("[hooks](../../docs/hooks.md)", "packages/a/README.md", pages)
    '[hooks](../../hooks.md)'
    >>> site_links("[a test](../packages/a/tests/test_a.py)", "docs/hooks.md", pages)
    'a test (`packages/a/tests/test_a.py`)'
    """
    page = page_path(source)

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path == "README.md":  # the site begins with another page
            path, anchor = "docs/index.md", ""
        if path in pages:
            return (
                f"[{text}]({posixpath.relpath(page_path(path), posixpath.dirname(page))}{anchor})"
            )
        if path.startswith("docs/"):
            return match[0]  # an image, or a link that mkdocs complains about
        return text if posixpath.basename(path) in text else f"{text} (`{path}`)"

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)


def named_objects(markdown: str) -> str:
    """Return ``markdown`` in which each object of a reference page has the heading that users
    write: ``bmt`` for ``bmtrain``, and one level below the page's sections.

    >>> print(named_objects("::: bmtrain.optim.whole"))
    ::: bmtrain.optim.whole
        options:
          heading: bmt.optim.whole
          toc_label: bmt.optim.whole
          heading_level: 2
    """
    level = 3 if re.search(r"^## ", markdown, re.MULTILINE) else 2

    def with_options(match: re.Match[str]) -> str:
        name = re.sub(r"^bmtrain\.", "bmt.", match[1])
        options = {"heading": name, "toc_label": name, "heading_level": level}
        lines = [f"      {key}: {value}" for key, value in options.items()]
        return "\n".join([f"::: {SHOWN_BY.get(match[1], match[1])}", "    options:", *lines])

    return OBJECT.sub(with_options, markdown)


def pages_of(navigation: Any, tabs: tuple[str, ...] = ()) -> set[str]:
    """Return the pages below an entry of the navigation, or below those of it that ``tabs`` name.

    >>> pages_of([{"How-to": [{"Load data": "data.md"}]}, {"Reference": "words.md"}], ("How-to",))
    {'data.md'}
    """
    if isinstance(navigation, str):
        return {navigation}
    if isinstance(navigation, list):
        return {page for each in navigation for page in pages_of(each, tabs)}
    entries = [entry for title, entry in navigation.items() if not tabs or title in tabs]
    return {page for entry in entries for page in pages_of(entry)}


def page_path(path: str) -> str:
    """Return the path in the site's sources of the document ``path`` of the repository."""
    return path.removeprefix("docs/")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of ``docs/`` (called by mkdocs)."""
    from mkdocs.structure.files import File

    for path in outside_pages():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page, and say how the search treats it (called by mkdocs)."""
    if page.file.src_uri in NOT_SEARCHED:
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri in pages_of(config["nav"], FIRST_TABS):
        page.meta["search"] = {"boost": 2}
    outside = set(outside_pages())
    uri = page.file.src_uri
    pages = outside | {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    source = uri if uri in outside else f"docs/{uri}"
    return named_objects(site_links(markdown, source, pages))
