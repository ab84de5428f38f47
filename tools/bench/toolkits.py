"""``TOOLKITS``: what can be measured, by name."""

from __future__ import annotations

from bench.deepspeed import DeepSpeed
from bench.fsdp2 import FSDP2
from bench.ours import Bmt
from bench.training import Training

TOOLKITS: dict[str, type[Training]] = {toolkit.name: toolkit for toolkit in (Bmt, FSDP2, DeepSpeed)}
