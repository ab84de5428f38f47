"""Plain torch on one rank: what every toolkit is compared with where nothing is sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bmtrain as bmt
from bench.case import DTYPES, Case
from bench.models import TransformerBlock, build_gpt
from bench.training import WEIGHT_DECAY, Training, learning_rate


class PlainTorch(Training):
    """Parameters in the dtype of computation, and torch's fused AdamW on them."""

    name = "torch"

    def __init__(self, case: Case, device: torch.device) -> None:
        def prepared(unit: nn.Module) -> nn.Module:
            if isinstance(unit, TransformerBlock):
                if case.recompute:
                    unit = checkpoint_wrapper(unit)
                if case.compile:
                    unit.compile()
            return unit

        self.model = build_gpt(
            case.gpt,
            dtype=DTYPES[case.dtype],
            rounded_to=DTYPES[case.dtype],
            device=device,
            shard=prepared,
            chain=lambda blocks: nn.Sequential(*blocks),
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=learning_rate(case.gpt),
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    @classmethod
    def version(cls) -> str:
        """See :meth:`Training.version`."""
        return str(torch.__version__)

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        return None if bmt.world_size() == 1 else "not applicable: plain torch has one rank"
