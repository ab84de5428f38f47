"""Lets ``python -m bmt_core.cli`` and torchrun start the program."""

from bmt_core.cli import main

main()
