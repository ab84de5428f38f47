"""``python -m bmt_core.cli`` runs the program ``bmt``, also under torchrun."""

from bmt_core.cli import main

main()
