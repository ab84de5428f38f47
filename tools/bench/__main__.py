"""``python3 tools/bench COMMAND``: what README.md beside this file describes."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

COMMANDS = {
    "kernels": "bench.kernels",
    "measure": "bench.run",
    "pipeline": "bench.pipeline",
    "state": "bench.state",
    "table": "bench.table",
}


def main() -> int:
    """Run the command that the first argument names and return its exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: bench {{{','.join(COMMANDS)}}} [options]; each has --help", file=sys.stderr)
        return 2
    status: int = import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:])
    return status


if __name__ == "__main__":
    # Started as a directory, it would be first on the path, and hide modules of its files' names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
