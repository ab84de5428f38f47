"""``python -m bmtrain`` is the program ``bmt``, also under torchrun; alone it is ``bmt doctor``."""

import sys

from bmtrain._program import main

if __name__ == "__main__":
    main(sys.argv[1:] or ["doctor"], prog_name="bmt")
