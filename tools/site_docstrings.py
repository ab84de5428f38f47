"""A griffe extension for the reference pages of the site: docstrings as Markdown, and defaults of
arguments as values.

Docstrings here have double backticks, roles as ``:class:`Block` ``, examples with ``>>>``, and code
that follows ``::``. Markdown knows none of the last three.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

try:
    from griffe import AliasResolutionError, Extension
except ModuleNotFoundError:  # only the site needs it
    AliasResolutionError, Extension = Exception, object

PLAIN_VALUE = re.compile(r"[-+*<\d.e\s]+|'[^']*'|\"[^\"]*\"")
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

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Let signatures say ``timeout=1800.0`` where the sources say ``DEFAULT_TIMEOUT``."""
        for member in members_of(pkg):
            if member.is_function:
                for parameter in member.parameters:
                    parameter.default = value_of(parameter.default, member)
            elif member.parent.is_class:  # a field of a dataclass, say
                member.value = value_of(member.value, member)


def members_of(obj: Any) -> Iterator[Any]:
    """Yield all functions and attributes that are defined in ``obj``, a module or a class."""
    for member in obj.members.values():
        if member.is_alias:
            continue
        if member.is_module or member.is_class:
            yield from members_of(member)
        elif member.is_function or member.is_attribute:
            yield member


def value_of(default: Any, member: Any) -> Any:
    """Return the value of ``default`` if it is the name of a number or a text, else ``default``."""
    name = str(default)
    if re.fullmatch(r"[A-Z_]+", name):
        with contextlib.suppress(AliasResolutionError, KeyError):
            constant = member.modules_collection[member.resolve(name)]
            if PLAIN_VALUE.fullmatch(str(constant.value)):
                return constant.value
    return default
