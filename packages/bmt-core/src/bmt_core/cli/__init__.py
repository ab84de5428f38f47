"""The program ``bmt``. Under torchrun: ``torchrun --nproc_per_node=2 -m bmt_core.cli bench``."""

from bmt_core.cli.program import COMMANDS, main

__all__ = ["COMMANDS", "main"]
