"""``TOOLKITS``: what can be measured, by name."""

from __future__ import annotations

from bench.deepspeed import DeepSpeed
from bench.dtensor import DTensorHalf, DTensorTraining
from bench.fsdp2 import FSDP2, FSDP2Offload
from bench.ours import Bmt
from bench.ours_parallel import BmtParallel
from bench.ours_pipelined import BmtPipelined
from bench.plain import PlainTorch
from bench.training import Training

_TOOLKITS: tuple[type[Training], ...] = (
    Bmt,
    FSDP2,
    FSDP2Offload,
    BmtParallel,
    BmtPipelined,
    DTensorTraining,
    DTensorHalf,
    DeepSpeed,
    PlainTorch,
)
TOOLKITS: dict[str, type[Training]] = {toolkit.name: toolkit for toolkit in _TOOLKITS}
