"""A griffe extension: docstrings as Markdown, for the reference pages of the site.

Docstrings here have double backticks, roles as ``:class:`Block` ``, examples with ``>>>``, and code
that follows ``::``. Markdown knows none of the last three.
"""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ModuleNotFoundError:  # only the site needs it
    Extension = object

ROLE = re.compile(r":\w+:`~?([^`]+)`")
DOCTEST = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.DOTALL | re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """Return ``docstring`` as Markdown.

    >>> as_markdown("Like :class:`Block`, of :mod:`bmt_core.launch`.")
    'Like `Block`, of `bmt_core.launch`.'
    >>> print(as_markdown("Write::"))
    Write:
    """
    text = ROLE.sub(r"`\1`", docstring)
    text = DOCTEST.sub(lambda match: f"```python\n{match[0].rstrip()}\n```\n", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class MarkdownDocstrings(Extension):  # type: ignore[misc]
    """Rewrite every docstring when griffe has read its object."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
