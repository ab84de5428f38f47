"""``use_float8``: compute the linear layers of a block in float8, by torchao."""

from __future__ import annotations

import dataclasses

import torch

import bmtrain as bmt

GATHERED = "tensorwise_gathered"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", GATHERED)


def use_float8(block: torch.nn.Module, recipe: str) -> None:
    """Replace the linear layers in ``block`` by torchao's, with the same parameters.

    Call it before the block is made a ``bmt.Block``. ``recipe`` says how numbers are scaled: see
    ``torchao.float8.Float8LinearRecipeName``; with :data:`GATHERED` ranks also gather weights in
    float8. Needs a run with ``tp_size=1``. CPUs have no products of float8 numbers: there the
    numbers are rounded to float8 and multiplied in float32.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (bmt.nn.ColumnParallelLinear, bmt.nn.RowParallelLinear)):
                setattr(module, name, plain_linear(child))
    is_gathered = recipe == GATHERED
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("tensorwise" if is_gathered else recipe),
        emulate=bmt.current().device.type == "cpu",
        enable_fsdp_float8_all_gather=is_gathered,
    )
    convert_to_float8_training(block, config=config)


def plain_linear(
    layer: bmt.nn.ColumnParallelLinear | bmt.nn.RowParallelLinear,
) -> torch.nn.Linear:
    """Return a layer of torch with the parameters of ``layer``, which torchao can convert."""
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    # The parameters themselves: layer.weight gathers a copy of the whole.
    for name in ("weight", "bias"):
        plain.register_parameter(name, layer._parameters[name])
    return plain
