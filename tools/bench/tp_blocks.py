"""The blocks that ``tp-block`` compares: torch's DTensor, bmt's layers, and the computation of one
rank without communication.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import bmtrain as bmt
from bench.dtensor import plan_of
from bench.fsdp2 import mesh_of
from bench.models import SEED, Size, TransformerBlock, fill
from bench.ours_parallel import parallel_unit
from bench.sequence_first import SequenceFirstBlock, sequence_first, tensor_ranks

Gradients = dict[str, torch.Tensor]


class Blocks(ABC):
    """Some blocks, one after the other, on rows (sequence / tp, batch, hidden) of this rank. Making
    them is collective.
    """

    communicates = True

    def __init__(
        self, size: Size, dtype: torch.dtype, device: torch.device, count: int, *, mode: str
    ) -> None:
        self.size, self.dtype, self.device, self.mode = size, dtype, device, mode
        self.chain = self._chain(
            [self._block(dense_block(size, dtype, device, number)) for number in range(count)]
        )

    @abstractmethod
    def _block(self, dense: nn.Module) -> nn.Module: ...

    def _chain(self, blocks: list[nn.Module]) -> nn.Module:
        if self.mode != "eager":
            # As an option, it also reaches the compilation of backward, which happens on
            # another thread.
            options = {"_micro_pipeline_tp": True} if self.mode == "async" else None
            for block in blocks:
                block.compile(dynamic=False, options=options)
        return nn.Sequential(*blocks)

    def run(self, rows: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run forward and backward; return the output and the gradient of ``rows``."""
        rows = rows.detach().requires_grad_()
        output: torch.Tensor = self.chain(rows)
        output.backward(gradient)  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        return output.detach(), rows.grad

    def clear(self) -> None:
        """Clear the gradients."""
        self.chain.zero_grad(set_to_none=True)

    def whole_gradients(self) -> Gradients:
        """Return the gradients of the first block by name, whole. Collective."""
        return {name: self._whole(p, p.grad) for name, p in self.chain[0].named_parameters()}  # type: ignore[index]

    def _whole(self, parameter: torch.Tensor, gradient: Any) -> torch.Tensor:
        raise NotImplementedError


class DTensorBlocks(Blocks):
    """``parallelize_module`` with sequence parallelism; mode "async" has compilation pipeline the
    products with copies.
    """

    def __init__(
        self, size: Size, dtype: torch.dtype, device: torch.device, count: int, *, mode: str
    ) -> None:
        if mode == "async":
            # On shared hosts a program that uses NVLink multicast can take the GPUs of others down.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            enable_symm_mem_for_group(mesh_of(device).get_group().group_name)
        super().__init__(size, dtype, device, count, mode=mode)

    def _block(self, dense: nn.Module) -> nn.Module:
        return parallelize_module(
            sequence_first(dense, self.size), mesh_of(self.device), plan_of(dense)
        )

    def _whole(self, parameter: torch.Tensor, gradient: Any) -> torch.Tensor:
        assert isinstance(gradient, DTensor)
        return gradient.full_tensor()


class BmtBlocks(Blocks):
    """bmt's parallel layers in Blocks, of which every rank keeps all that is not cut over tp, as
    with DTensor.
    """

    def _block(self, dense: nn.Module) -> nn.Module:
        return bmt.Block(
            parallel_unit(dense, self.size, self.device),
            use_checkpoint=False,
            zero_level=0,
            initialized=True,
            compile=self.mode != "eager",
        )

    def _chain(self, blocks: list[nn.Module]) -> nn.Module:
        return bmt.TransformerBlockList(blocks)

    def _whole(self, parameter: torch.Tensor, gradient: Any) -> torch.Tensor:
        assert isinstance(parameter, bmt.DistributedParameter)
        return parameter.gather_all_like(gradient)


class LocalBlocks(Blocks):
    """What one rank computes, with nothing communicated: what parallel blocks would take if
    communication took no time.
    """

    communicates = False

    def _block(self, dense: nn.Module) -> nn.Module:
        return LocalBlock(self.size, self.dtype, self.device)

    def run(self, rows: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Blocks.run`."""
        length = rows.shape[0] * len(tensor_ranks())
        for block in self.chain.children():
            assert isinstance(block, LocalBlock)
            if block.others.shape[0] != length:
                block.others = torch.randn(
                    (length, *rows.shape[1:]), dtype=self.dtype, device=self.device
                )
        return super().run(rows, gradient)


class LocalBlock(SequenceFirstBlock):
    """The products and the attention of one rank, with constant numbers where other ranks' rows
    would be.
    """

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        tp = len(tensor_ranks())
        with torch.device("meta"):
            super().__init__(size, dtype)
            self.qkv = nn.Linear(size.dim_model, 3 * size.dim_model // tp, dtype=dtype)
            self.attention_out = nn.Linear(size.dim_model // tp, size.dim_model, dtype=dtype)
            self.up = nn.Linear(size.dim_model, size.dim_ff // tp, dtype=dtype)
            self.down = nn.Linear(size.dim_ff // tp, size.dim_model, dtype=dtype)
        self.to_empty(device=device)
        fill(self, size, seed=SEED, rounded_to=dtype)
        self.others = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take (sequence / tp, batch, hidden) to the same shape."""
        attended = self._attention(_gather(self.norm_attention(hidden), self.others))
        hidden = hidden + _scatter(attended, self.others, hidden.shape[0])
        inner = F.gelu(
            self.up(_gather(self.norm_feed_forward(hidden), self.others)), approximate="tanh"
        )
        hidden = hidden + _scatter(self.down(inner), self.others, hidden.shape[0])
        return hidden


class _Gather(torch.autograd.Function):
    """In the place of an all-gather: ``others`` in forward, and in backward this rank's rows of
    the gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        ctx.length = rows.shape[0]
        return others.view_as(others)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0][: ctx.length], None


class _Scatter(torch.autograd.Function):
    """In the place of a reduce-scatter: this rank's rows in forward, and ``others`` as
    the gradient.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, others: torch.Tensor, length: int) -> torch.Tensor:
        ctx.save_for_backward(others)
        return whole[:length]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.saved_tensors[0], None, None


_gather: Any = _Gather.apply
_scatter: Any = _Scatter.apply

KINDS: dict[str, type[Blocks]] = {"dtensor": DTensorBlocks, "bmt": BmtBlocks, "local": LocalBlocks}


def dense_block(
    size: Size, dtype: torch.dtype, device: torch.device, number: int
) -> TransformerBlock:
    """Return the whole block of ``models.py``, with its values."""
    with torch.device("meta"):
        block = TransformerBlock(size, dtype)
    block.to_empty(device=device)
    fill(block, size, seed=SEED + number, rounded_to=torch.bfloat16)
    return block
