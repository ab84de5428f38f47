"""bmt: blocks in a ``TransformerBlockList``, embeddings and head as blocks of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bmtrain as bmt
from bench.case import DTYPES, Case
from bench.models import Head, TransformerBlock, build_gpt
from bench.training import WEIGHT_DECAY, Training, learning_rate


class Bmt(Training):
    """Parameters in the dtype of computation; the optimizer keeps float32 masters."""

    name = "bmt"

    def __init__(self, case: Case, device: torch.device) -> None:
        def shard(unit: nn.Module) -> nn.Module:
            is_block = isinstance(unit, TransformerBlock)
            # What backward needs first is not worth freeing: all toolkits keep the head.
            level = min(case.level, 2) if isinstance(unit, Head) else case.level
            return bmt.Block(
                self.parallel(unit, case, device),
                use_checkpoint=case.recompute and is_block,
                zero_level=level,
                initialized=True,
                **engine_settings(case, is_block=is_block),
            )

        dtype = DTYPES[case.dtype]
        self.model = build_gpt(
            case.gpt,
            dtype=dtype,
            rounded_to=dtype,
            device=device,
            shard=shard,
            chain=bmt.TransformerBlockList,
            float8=case.float8,
        )
        self.optimizer = self.make_optimizer(case)

    def make_optimizer(self, case: Case) -> torch.optim.Optimizer:
        """Return the optimizer of the case, for the model."""
        return bmt.optim.create(
            case.optimizer,
            self.model.parameters(),
            lr=learning_rate(case.gpt),
            **optimizer_settings(case),
        )

    def parallel(self, unit: nn.Module, case: Case, device: torch.device) -> nn.Module:
        """Return what is made a Block in the place of ``unit``, with its values."""
        return unit

    @classmethod
    def version(cls) -> str:
        """See :meth:`Training.version`."""
        return bmt.__version__

    def backward(self, loss: torch.Tensor) -> None:
        """See :meth:`Training.backward`. bmt sums over ranks of different data where the
        peers average.
        """
        super().backward(loss * len(self.data_ranks()) / bmt.world_size())

    def close(self) -> None:
        """See :meth:`Training.close`. An update that is under way keeps the parameters."""
        if isinstance(self.optimizer, bmt.optim.AdamOptimizer):
            self.optimizer.wait()
        super().close()


def engine_settings(case: Case, *, is_block: bool) -> dict[str, Any]:
    """Return the arguments of ``bmt.Block`` that the case asks for; what it does not ask for is
    left to the engine.
    """
    settings: dict[str, Any] = {}
    if case.compile and is_block:
        settings["compile"] = True
    if case.reduce_dtype is not None:
        settings["reduce_dtype"] = case.reduce_dtype
    return settings


def optimizer_settings(case: Case) -> dict[str, Any]:
    """Return the options that make the optimizer do the work of AdamW."""
    name = case.optimizer
    settings: dict[str, Any] = {"weight_decay": WEIGHT_DECAY}
    if name in ("adam", "adam_offload", "adamw"):
        settings["overlap_forward"] = case.overlap_forward
    if name in ("adam", "adam_offload"):  # which have both kinds of decay
        settings["decoupled_weight_decay"] = True
    if name == "adam_offload":
        settings["device_memory"] = case.device_memory
    return settings
