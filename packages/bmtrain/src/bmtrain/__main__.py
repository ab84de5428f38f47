"""``python -m bmtrain`` prints what ``bmt doctor`` prints."""

import sys

from bmtrain._lazy import resolve
from bmtrain._table import Home


def main() -> None:
    """Run ``bmt doctor``; without bmt-core, say how to install it."""
    try:
        program = resolve(Home("bmt_core.cli", "main"), "python -m bmtrain")
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    program(["doctor", *sys.argv[1:]], prog_name="bmt")


if __name__ == "__main__":
    main()
