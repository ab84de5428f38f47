"""The optimizers that ``--optimizer`` names: one, or Muon and AdamW side by side."""

from __future__ import annotations

import torch

import bmtrain as bmt
from options import Options


def build_optimizers(options: Options, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of ``options`` for the parameters of ``model``."""
    if options.optimizer == "muon":
        return muon_and_adamw(model, options.lr)
    overlap = {"overlap_forward": True} if options.overlap_forward else {}
    return [bmt.optim.create(options.optimizer, model.parameters(), lr=options.lr, **overlap)]


def muon_and_adamw(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings, norms and biases.

    Muon needs whole matrices: each is stepped on one of the ranks that share it. Its updates are
    scaled to be as large as those of AdamW, so that ``lr`` is that of both.
    """
    # Without weight decay, the groups are only what each optimizer steps. The output projection is
    # the embedding.
    matrices, others = bmt.optim.param_groups(model, weight_decay=0.0, no_decay=["*embedding*"])
    muon = bmt.optim.whole(
        torch.optim.Muon,
        [matrices],
        lr=lr,
        adjust_lr_fn="match_rms_adamw",
        cost=lambda shape: shape.numel() * min(shape),
    )
    return [muon, bmt.optim.AdamW([others], lr=lr)]
