"""The program ``bmt``. Under torchrun: ``torchrun --nproc_per_node=2 -m bmtrain bench``."""

from bmtrain._program.program import main

__all__ = ["main"]
