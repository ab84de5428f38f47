"""DeepSpeed ZeRO-3, if it can be imported: bf16, with the bucket sizes that Hugging Face's
integration computes.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from bench.case import DTYPES, Case
from bench.models import TransformerBlock, build_gpt
from bench.training import WEIGHT_DECAY, Training, learning_rate, token_loss


class DeepSpeed(Training):
    """ZeRO-3 with torch's AdamW on its float32 partitions: DeepSpeed's own would be
    compiled first.
    """

    name = "deepspeed"

    def __init__(self, case: Case, device: torch.device) -> None:
        deepspeed = import_module("deepspeed")
        config = configuration(case)

        def shard(unit: nn.Module) -> nn.Module:
            deepspeed.zero.Init(module=unit, config_dict_or_path=config)
            if case.recompute and isinstance(unit, TransformerBlock):
                # Reentrant: the other kind compares the recomputed weights with those of forward,
                # which are freed by then.
                unit = checkpoint_wrapper(unit, checkpoint_impl=CheckpointImpl.REENTRANT)
            return unit

        dtype = DTYPES[case.dtype]
        model = build_gpt(
            case.gpt,
            dtype=dtype,
            rounded_to=dtype,
            device=device,
            shard=shard,
            chain=lambda blocks: nn.Sequential(*blocks),
        )
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate(case.gpt), weight_decay=WEIGHT_DECAY, fused=True
        )
        self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    @classmethod
    def version(cls) -> str:
        """See :meth:`Training.version`."""
        return version("deepspeed")

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        if case.shard_size is not None:
            return "not measured: it shards over all ranks"
        if case.level != 3 or case.compile:
            return "not applicable: DeepSpeed is measured at level 3, not compiled"
        try:
            import_module("deepspeed")
        except ModuleNotFoundError as error:
            return f"not importable: {error}"
        return None

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`."""
        loss = token_loss(self._engine(tokens), targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        """See :meth:`Training.close`."""
        self._engine.destroy()
        super().close()


def configuration(case: Case) -> dict[str, Any]:
    """Return DeepSpeed's configuration of the case."""
    width = case.gpt.dim_model
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": case.dtype == "bf16"},
        "gradient_clipping": 0.0,  # no toolkit clips; left out, it is 1
        "communication_data_type": "fp32" if case.reduce_dtype == "fp32" else case.dtype,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": width * width * 9 // 10,
            "stage3_param_persistence_threshold": 10 * width,
        },
    }
