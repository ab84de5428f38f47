"""torch's own tensor parallelism: DTensor, ``parallelize_module`` and sequence parallelism; FSDP2
over the other ranks.

torch has no mixed precision for tensor parallelism but FSDP2's, so FSDP2 wraps every unit also
where only one rank has its slice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import bmtrain as bmt
from bench.case import Case
from bench.fsdp2 import FSDP2
from bench.models import Embeddings, Head, TransformerBlock
from bench.sequence_first import sequence_first, tensor_ranks
from bench.training import token_loss

_meshes: dict[dist.ProcessGroup | None, DeviceMesh] = {}


class DTensorTraining(FSDP2):
    """``parallelize_module`` of every unit over tp, then FSDP2 over dp; the loss of logits that
    stay cut.
    """

    name = "dtensor"

    def mesh(self, case: Case, device: torch.device) -> DeviceMesh:
        """See :meth:`FSDP2.mesh`."""
        return grid_mesh(device)["dp"]

    def parallel(self, unit: nn.Module, case: Case, device: torch.device) -> nn.Module:
        """See :meth:`FSDP2.parallel`."""
        return parallelize_module(
            sequence_first(unit, case.gpt), grid_mesh(device)["tp"], plan_of(unit)
        )

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        if case.shard_size is not None:
            return "not measured: it shards over all ranks but those of tp"
        return super().obstacle(case)

    def data_ranks(self) -> list[int]:
        """See :meth:`Training.data_ranks`."""
        return tensor_ranks()

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.loss`. The logits are (length, batch, vocabulary)."""
        return token_loss(logits, targets.t())

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`."""
        with loss_parallel():
            loss = super().step(tokens, targets)
        assert isinstance(loss, DTensor)
        return loss.to_local()


def plan_of(unit: nn.Module) -> dict[str, ParallelStyle]:
    """Return how each module of ``unit`` is parallel; between them, rows are cut along
    the sequence.
    """
    rows = Shard(0)
    if isinstance(unit, TransformerBlock):
        return {
            "norm_attention": SequenceParallel(sequence_dim=0),
            "qkv": ColwiseParallel(input_layouts=rows),
            "attention_out": RowwiseParallel(output_layouts=rows),
            "norm_feed_forward": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=rows),
            "down": RowwiseParallel(output_layouts=rows),
        }
    if isinstance(unit, Embeddings):
        return {
            name: RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
            for name in ("token", "position")
        }
    assert isinstance(unit, Head)
    return {
        "norm": SequenceParallel(sequence_dim=0),
        "logits": ColwiseParallel(
            input_layouts=rows, output_layouts=Shard(-1), use_local_output=False
        ),
    }


def grid_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks, with the axes of bmt's grid: one for all cases, see
    :func:`bench.fsdp2.mesh_of`.
    """
    world = dist.group.WORLD
    if world not in _meshes:
        tp = len(tensor_ranks())
        _meshes[world] = init_device_mesh(
            device.type, (bmt.world_size() // tp, tp), mesh_dim_names=("dp", "tp")
        )
    return _meshes[world]
