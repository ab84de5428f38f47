"""``Plan``: which modules of a model become parallel layers, and how activations lie between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bmt_tp.plans.styles import Layout, Style


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How :func:`parallelize` cuts a model of consecutive layers over the ranks along ``tp``.

    Modules are named by patterns, of which each part between dots is matched by ``fnmatch``: ``*.mlp`` is ``a.mlp`` and not
    ``a.b.mlp``. Activations lie in three ways:

    - outside of the layers (batch, sequence, features), alike on every rank;
    - inside, between attention and feed-forward modules, this rank's rows, (sequence / tp, batch, features): norms, residual
      sums and dropout work on them;
    - inside of these modules, all positions of this rank's heads or features.
    """

    parameters: Mapping[str, Style]
    """The modules whose parameters are cut, or which work on whole activations outside of the layers.

    Every parameter has to be named by one of the patterns, except those of one dim inside of :attr:`layers` and :attr:`last`,
    which stay as they are: norms.
    """

    layers: str
    """The consecutive layers. Each takes the hidden states first; those that the first one is given are made rows."""

    last: str
    """The module after which hidden states are whole again: the norm after the layers, or without one the last layer."""

    gathered: Mapping[str, Layout] = field(default_factory=dict)
    """The modules inside of layers whose first input, rows, is gathered once for several :class:`Column` layers."""

    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The attributes of modules that count heads or features, and are to count those of this rank."""
