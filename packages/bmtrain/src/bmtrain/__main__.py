"""``python -m bmtrain`` is the program ``bmt``, also under torchrun; alone it is ``bmt doctor``."""

import sys

from bmtrain._lazy import resolve
from bmtrain._table import Home


def main() -> None:
    """Run the program; without bmt-core, say how to install it."""
    try:
        resolve(Home("bmt_core.errors", "BmtError"), "python -m bmtrain")
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    from bmtrain._program import main as program

    program(sys.argv[1:] or ["doctor"], prog_name="bmt")


if __name__ == "__main__":
    main()
