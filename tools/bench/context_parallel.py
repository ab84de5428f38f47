"""Real models on sequences that ranks along ``cp`` share: bmt-cp, and FSDP2 with torch's context
parallelism. Each rank returns its part of the mean loss times the number of parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import bmtrain as bmt
from bench.case import Case
from bench.real_training import BmtRealTraining, FSDP2RealTraining

TORCH_ATTENTION = "torch_cp"


class BmtLongTraining(BmtRealTraining):
    """bmt: ``cp_size``, ``bmt.cp.split`` and a count."""

    attention = "bmt_cp"

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._cp = case.cp
        self._manager = bmt.optim.OptimManager()
        self._manager.add_optimizer(self.optimizer)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`."""
        part = bmt.cp.split(input_ids=tokens, labels=tokens)
        loss: torch.Tensor = self.model(**part, use_cache=False).loss
        self._manager.backward(loss, count=part.count)
        self._manager.step()
        self._manager.zero_grad()
        return loss.detach() * (self._cp / _targets(tokens))

    def data_ranks(self) -> list[int]:
        """See :meth:`Training.data_ranks`."""
        return [bmt.current().topology.data_rank]


class FSDP2LongTraining(FSDP2RealTraining):
    """FSDP2 over all ranks, and ``context_parallel`` of torch around forward and backward: a ring,
    with the work of causal attention balanced.
    """

    attention = TORCH_ATTENTION

    def __init__(self, case: Case, device: torch.device) -> None:
        _register_attention()
        super().__init__(case, device)
        ranks = dist.get_world_size()
        grid = init_device_mesh(
            device.type, (ranks // case.cp, case.cp), mesh_dim_names=("dp", "cp")
        )
        self._mesh, self._cp = grid["cp"], case.cp

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        if not case.fused_loss:
            return "not applicable: the loss of parts is measured with --fused-loss"
        return super().obstacle(case)

    @staticmethod
    def loss_by_liger(
        model: Any, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> Any:
        """See :meth:`FSDP2RealTraining.loss_by_liger`; ``labels`` are shifted, and the loss is a
        sum.
        """
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        from transformers.modeling_outputs import CausalLMOutput

        hidden = model.model(input_ids=input_ids, **kwargs).last_hidden_state
        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        rows = hidden.flatten(0, 1)
        return CausalLMOutput(loss=loss(model.lm_head.weight, rows, labels.flatten()))

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        parts = [tokens.clone(), labels, positions]
        with context_parallel(
            self._mesh, buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts)
        ):
            loss: torch.Tensor = self.model(
                input_ids=parts[0], labels=labels, position_ids=positions, use_cache=False
            ).loss
            # FSDP2 averages over all ranks.
            loss = loss * (self._cp / _targets(tokens))
            self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def data_ranks(self) -> list[int]:
        """See :meth:`Training.data_ranks`."""
        return [dist.get_rank() // self._cp]


def _targets(tokens: torch.Tensor) -> int:
    return tokens.shape[0] * (tokens.shape[1] - 1)


def _register_attention() -> None:
    """Make torch's causal attention known to transformers without a mask, which
    ``context_parallel`` does not take.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        scaling: float | None = None,
        **further: Any,
    ) -> tuple[torch.Tensor, None]:
        found = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register(TORCH_ATTENTION, attention)
    AttentionMaskInterface.register(TORCH_ATTENTION, lambda *args, **kwargs: None)
