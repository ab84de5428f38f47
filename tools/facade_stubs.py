#!/usr/bin/env python3
"""Write the facade's stubs (``*.pyi``) from its table, so that type checkers see the real things
behind the lazy names.

Run with the Python of ``.venv`` after each change to the table:
``.venv/bin/python tools/facade_stubs.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bmtrain._table import TABLE, submodules

ROOT = Path(__file__).resolve().parent.parent
FACADE = ROOT / "packages" / "bmtrain" / "src" / "bmtrain"


def main() -> int:
    """Write one stub for each module of the table, and remove those of modules that are in it
    no more.
    """
    wanted = {stub_path(module): stub_text(module) for module in TABLE}
    for path in set(FACADE.rglob("*.pyi")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--quiet", "--select", "I", "--fix", str(FACADE)], check=True)
    subprocess.run([*ruff, "format", "--quiet", *map(str, wanted)], check=True)
    print(f"{len(wanted)} stubs")
    return 0


def stub_path(module: str) -> Path:
    """Return the file of ``module``'s stub."""
    path = FACADE.joinpath(*module.split(".")[1:])
    return path / "__init__.pyi" if submodules(module) else path.with_suffix(".pyi")


def stub_text(module: str) -> str:
    """Return the stub of ``module``."""
    lines = ["# Written by tools/facade_stubs.py from bmtrain/_table.py.", ""]
    for name, home in TABLE[module].items():
        lines.append(f"from {home.module} import {home.attribute} as {name}")
    children = [name for name in submodules(module) if name not in TABLE[module]]
    lines += [f"from . import {name} as {name}" for name in children]
    if module == "bmtrain":
        lines += ["", "__version__: str"]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
