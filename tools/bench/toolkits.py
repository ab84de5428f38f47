"""``toolkit_of``: what trains a case. ``TOOLKITS``: what trains the GPT, by name."""

from __future__ import annotations

from bench.case import Case
from bench.context_parallel import BmtLongTraining, FSDP2LongTraining
from bench.dtensor import DTensorTraining
from bench.fsdp2 import FSDP2, FSDP2Offload
from bench.ours import Bmt
from bench.ours_parallel import BmtParallel
from bench.ours_pipelined import BmtPipelined
from bench.plain import PlainTorch
from bench.real_training import BmtRealTraining, FSDP2RealTraining
from bench.training import Training

_TOOLKITS: tuple[type[Training], ...] = (
    Bmt,
    FSDP2,
    FSDP2Offload,
    BmtParallel,
    BmtPipelined,
    DTensorTraining,
    PlainTorch,
)
TOOLKITS: dict[str, type[Training]] = {toolkit.name: toolkit for toolkit in _TOOLKITS}
_OF_REAL_MODELS: tuple[type[Training], ...] = (BmtRealTraining, FSDP2RealTraining)
OF_REAL_MODELS: dict[str, type[Training]] = {toolkit.name: toolkit for toolkit in _OF_REAL_MODELS}
_OF_LONG_SEQUENCES: tuple[type[Training], ...] = (BmtLongTraining, FSDP2LongTraining)
OF_LONG_SEQUENCES = {toolkit.name: toolkit for toolkit in _OF_LONG_SEQUENCES}


def toolkit_of(case: Case) -> type[Training]:
    """Return what trains ``case``."""
    of_models = OF_REAL_MODELS if case.cp == 1 else OF_LONG_SEQUENCES
    return (TOOLKITS if case.model is None else of_models)[case.toolkit]
