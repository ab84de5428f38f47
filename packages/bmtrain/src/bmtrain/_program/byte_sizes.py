"""``parse_bytes``: a number of bytes from the words of a command line."""

from __future__ import annotations

import re

import click

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def parse_bytes(text: str) -> int:
    """Return a number of bytes from a text with an optional unit; units are powers of 1024.

    >>> parse_bytes("4096"), parse_bytes("64K"), parse_bytes("1GiB")
    (4096, 65536, 1073741824)
    """
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(
            f"{text!r} is not a number of bytes. Write for example 65536, 64K, 64M or 1G."
        )
    return int(match[1]) * _UNITS[match[2]]
