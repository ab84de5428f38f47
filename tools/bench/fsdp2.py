"""FSDP2, as its users set it up: float32 shards, a mixed-precision policy, one group for each unit,
fused AdamW.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import bmtrain as bmt
from bench.case import DTYPES, Case
from bench.models import GATHERED, Head, TransformerBlock, build_gpt
from bench.training import WEIGHT_DECAY, Training, learning_rate

_meshes: dict[tuple[dist.ProcessGroup | None, int], DeviceMesh] = {}


class FSDP2(Training):
    """``torch.distributed.fsdp.fully_shard``; level 3 frees after forward, level 2 does not."""

    name = "fsdp2"

    def __init__(self, case: Case, device: torch.device) -> None:
        mesh = self.mesh(case, device)
        policy = mixed_precision(case)
        self._gathers_float8 = case.float8 == GATHERED

        def shard(unit: nn.Module) -> nn.Module:
            frees = case.level == 3 and not isinstance(unit, Head)
            unit = self.parallel(unit, case, device)
            if isinstance(unit, TransformerBlock):
                if case.recompute:
                    unit = checkpoint_wrapper(unit)
                if case.compile:
                    unit.compile()
            self.fully_shard(unit, mesh, policy, frees)
            return unit

        self.model = build_gpt(
            case.gpt,
            dtype=torch.float32,
            rounded_to=DTYPES[case.dtype],
            device=device,
            shard=shard,
            chain=lambda blocks: nn.Sequential(*blocks),
            float8=case.float8,
        )
        self.fully_shard(self.model, mesh, policy, None)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=learning_rate(case.gpt),
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`; scales for gathers in float8 are found once, as torchao
        advises.
        """
        loss = super().step(tokens, targets)
        if self._gathers_float8:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)
        return loss

    def mesh(self, case: Case, device: torch.device) -> DeviceMesh:
        """Return the ranks over which parameters are sharded: the last axis, where there are two,
        and copied along the first.
        """
        return mesh_of(device, case.shard_size)

    def fully_shard(
        self, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, frees: bool | None
    ) -> None:
        """Shard ``module`` over ``mesh``; None leaves it to FSDP2 whether it frees
        after forward.
        """
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)

    def parallel(self, unit: nn.Module, case: Case, device: torch.device) -> nn.Module:
        """Return what is sharded in the place of ``unit``, with its values."""
        return unit

    @classmethod
    def version(cls) -> str:
        """See :meth:`Training.version`."""
        return str(torch.__version__)

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        return None if case.level in (2, 3) else f"not applicable: FSDP2 has no level {case.level}"


class FSDP2Offload(FSDP2):
    """FSDP2 with parameters and states in host memory, where the optimizer steps."""

    name = "fsdp2-offload"

    def fully_shard(
        self, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, frees: bool | None
    ) -> None:
        """See :meth:`FSDP2.fully_shard`."""
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=frees,
            offload_policy=offload,
        )


def mixed_precision(case: Case) -> MixedPrecisionPolicy:
    """Return the policy of the case: none for float32."""
    if case.dtype == "fp32":
        return MixedPrecisionPolicy()
    reduce_dtype = torch.float32 if case.reduce_dtype == "fp32" else DTYPES[case.dtype]
    return MixedPrecisionPolicy(param_dtype=DTYPES[case.dtype], reduce_dtype=reduce_dtype)


def mesh_of(device: torch.device, shard_size: int | None = None) -> DeviceMesh:
    """Return the mesh of all ranks, (copies, shards) if ``shard_size`` is less than all. There is
    one for all cases: a new one may make communicators that nothing frees.
    """
    world = bmt.world_size()
    shards = shard_size or world
    key = dist.group.WORLD, shards
    if key not in _meshes:
        axes = (
            {"shards": shards} if shards == world else {"copies": world // shards, "shards": shards}
        )
        _meshes[key] = init_device_mesh(
            device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
    return _meshes[key]
