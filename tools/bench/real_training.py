"""Real models under bmt and under FSDP2, each at the settings that its users choose."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import bmtrain as bmt
from bench.case import DTYPES, Case
from bench.fsdp2 import mesh_of, mixed_precision
from bench.models import INIT_STD, SEED
from bench.ours import optimizer_settings
from bench.real_models import RealModel, causal_lm
from bench.training import WEIGHT_DECAY, Training, learning_rate

ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class RealTraining(Training):
    """A causal language model that computes the loss itself. ``attention``: its implementation, by
    transformers' name.
    """

    attention: ClassVar[str] = "sdpa"

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`. The model shifts ``tokens`` to get its targets."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer updates."""
        return [each for each in self.model.parameters() if each.requires_grad]


class BmtRealTraining(RealTraining):
    """bmt: the wrapper, on parameters in the dtype of computation."""

    name = "bmt"

    def __init__(self, case: Case, device: torch.device) -> None:
        import bmt_hf

        assert isinstance(case.shape, RealModel)
        dtype = DTYPES[case.dtype]
        self.model = case.shape.on_meta(dtype, self.attention)
        if case.fused_loss:
            bmt_hf.use_linear_cross_entropy(causal_lm(self.model))
        of_wrapper: dict[str, Any] = {"keep": _kept_by_bmt(case.keep)} if case.keep else {}
        # PEFT's adapters are float32, and computed in the dtype of the model.
        param_dtype = None if case.shape.lora is None else dtype
        fill = _Fill(self.model)
        base = causal_lm(self.model).model
        of_block: dict[str, Any] = {}
        if case.offload_inputs:
            of_block["offload_inputs"] = True
        if case.tile is not None:
            of_block["tile"] = case.tile
            for layer in base.layers:
                for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                    part.token_wise = True
        base.layers = bmt.TransformerBlockList(
            [
                bmt.Block(
                    layer,
                    use_checkpoint=case.recompute,
                    compile=case.compile,
                    param_dtype=param_dtype,
                    **of_block,
                )
                for layer in base.layers
            ]
        )
        bmt.BMTrainModelWrapper(self.model, init=fill, param_dtype=param_dtype, **of_wrapper)
        self.optimizer = bmt.optim.create(
            case.optimizer,
            self.trained(),
            lr=learning_rate(case.shape),
            **optimizer_settings(case),
        )

    @classmethod
    def version(cls) -> str:
        """See :meth:`Training.version`."""
        return bmt.__version__

    def backward(self, loss: torch.Tensor) -> None:
        """See :meth:`Training.backward`. bmt sums over ranks where the peers average."""
        super().backward(loss / bmt.world_size())

    def close(self) -> None:
        """See :meth:`Training.close`. An update that is under way keeps the parameters."""
        if isinstance(self.optimizer, bmt.optim.AdamOptimizer):
            self.optimizer.wait()
        super().close()


class FSDP2RealTraining(RealTraining):
    """FSDP2: float32 shards of what is trained, each layer a group, selective recomputation by
    torch's policies, and Liger's loss.
    """

    name = "fsdp2"

    def __init__(self, case: Case, device: torch.device) -> None:
        assert isinstance(case.shape, RealModel)
        lora = case.shape.lora is not None
        self.model = case.shape.on_meta(
            DTYPES[case.dtype] if lora else torch.float32, self.attention
        )
        base = causal_lm(self.model)
        if case.fused_loss:
            base.forward = partial(self.loss_by_liger, base)
        mesh, policy = mesh_of(device, case.shard_size), mixed_precision(case)
        fill = _Fill(self.model)
        for number, layer in enumerate(base.model.layers):
            _materialize(layer, device, fill)
            if case.recompute:
                layer = checkpoint_wrapper(layer, **_kept_by_torch(case.keep))
            if case.compile:
                layer.compile()
            base.model.layers[number] = layer
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=case.level == 3)
        _materialize(self.model, device, fill)
        base.tie_weights()
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            self.trained(), lr=learning_rate(case.shape), weight_decay=WEIGHT_DECAY, fused=True
        )

    @classmethod
    def version(cls) -> str:
        """See :meth:`Training.version`."""
        return str(torch.__version__)

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        if case.level not in (2, 3):
            return f"not applicable: FSDP2 has no level {case.level}"
        if case.fused_loss:
            try:
                import liger_kernel  # noqa: F401
            except ImportError:
                return "not applicable: liger-kernel is not installed"
        return None

    @staticmethod
    def loss_by_liger(
        model: Any, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Stand in for the forward of a causal language model that has ``labels``: the loss is
        computed from hidden states in chunks, without the logits.
        """
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        from transformers.modeling_outputs import CausalLMOutput

        hidden = model.model(input_ids=input_ids, **kwargs).last_hidden_state
        loss = LigerFusedLinearCrossEntropyLoss()
        rows, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return CausalLMOutput(loss=loss(model.lm_head.weight, rows, targets))


def _kept_by_bmt(keep: str) -> str | tuple[str, ...] | int:
    """Return the argument ``keep`` that a text such as "attention+products" or "24", in GiB,
    stands for.
    """
    return int(float(keep) * 2**30) if keep[0].isdigit() else tuple(keep.split("+"))


def _kept_by_torch(keep: str | None) -> dict[str, Any]:
    """Return the arguments of torch's checkpoints that keep "attention", or, as "selective", every
    second product, too, or, as "products", every product.
    """
    if keep is None:
        return {}

    def contexts() -> Any:
        products = {False: 0, True: 0}  # so far, in forward and in the recomputation

        def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = function in ATTENTION
            if function in PRODUCTS and keep != "attention":
                products[context.is_recompute] += 1
                kept = keep == "products" or products[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return {"context_fn": contexts}


class _Fill:
    """Gives one module after another its first values, which are the same for every toolkit, number
    of ranks and dtype: normal ones rounded to bfloat16, ones in norms, zeros in the second factors
    of adapters. Buffers get their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._base = causal_lm(model)
        self._names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        path = self._names.get(module)
        if path is None:  # of bmt's own, around those of the model
            return
        if next(module.buffers(recurse=False), None) is not None:
            self._base._init_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1 or "lora_B" in path:
                parameter.fill_(float(parameter.dim() == 1))
                continue
            seed = SEED + zlib.crc32(f"{path}.{name}".encode())
            generator = torch.Generator(parameter.device).manual_seed(seed)
            values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
            parameter.copy_(values.normal_(std=INIT_STD, generator=generator))


def _materialize(unit: nn.Module, device: torch.device, fill: _Fill) -> None:
    """Move what is still on the device "meta" in ``unit`` to ``device``, with values."""
    for module in unit.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(each.is_meta for each in own):
            module.to_empty(device=device, recurse=False)
            fill(module)
