"""The model of a :class:`bmt_hf.Trainer`: what is refused, wrapping, and the recomputation of
its Blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import is_compiled
from bmt_hf.argument_tables import kept_of
from bmt_params.guards.refused_functions import has_sharded_parameters
from bmt_zero import Block, BMTrainModelWrapper
from bmt_zero.adapters import adapters_of, narrow_layers_of_wide_adapters
from bmt_zero.block_engine import keep_in_blocks
from bmt_zero.param_dtype import note_compute_dtype


def check_model(model: object) -> None:
    """Raise :class:`ConfigError` unless ``model`` can be wrapped, or is wrapped by bmt."""
    reason = _why_not(model)
    if reason is not None:
        raise ConfigError(
            f"bmt_hf.Trainer cannot shard this {type(model).__name__}: {reason}. Give it a plain"
            " model, one on the meta device, or one that BMTrainModelWrapper has wrapped."
        )


def _why_not(model: object) -> str | None:
    if not isinstance(model, nn.Module):
        return "it is no torch.nn.Module"
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        return "it is in a wrapper of torch, which reduces gradients itself"
    if is_compiled(model):
        return "it was compiled as a whole; Block(layer, compile=True) compiles a layer"
    if getattr(model, "hf_device_map", None) is not None:
        return "it was loaded with a device_map, which places its layers"
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return (
            "its parameters are DTensors: it was loaded with a plan of transformers, or sharded"
            " by torch"
        )
    if getattr(model, "quantization_method", None) is not None:
        return (
            f"it is quantized ({model.quantization_method}), and parts of its storage are no parts"
            " of its parameters"
        )
    return None


def wrapped(model: Any) -> Any:
    """Return ``model``, wrapped unless it is already. Collective: every rank begins with the values
    of rank 0, as with DDP. PEFT's float32 adapters of a bfloat16 model are computed in bfloat16.
    """
    check_model(model)
    if has_sharded_parameters(model):
        return model
    dtype = narrow_layers_of_wide_adapters(model)
    # Gradients in float16 would need another loss scale.
    if dtype is not torch.bfloat16:
        return BMTrainModelWrapper(model, sync="rank0")
    adapters = adapters_of(model)
    for parameter in model.parameters():
        if parameter not in adapters:
            note_compute_dtype(parameter, parameter.dtype)
    return BMTrainModelWrapper(model, sync="rank0", param_dtype=dtype)


def set_recomputation(model: nn.Module, is_on: bool, options: Mapping[str, Any]) -> None:
    """Have every ``every_n_layers``-th Block recompute its activations in backward, but for what
    ``keep`` says, or none.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = is_on and number % options.get("every_n_layers", 1) == 0
    keep_in_blocks([block._bmt_block for block in blocks], kept_of(options.get("keep")))
