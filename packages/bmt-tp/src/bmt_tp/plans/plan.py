"""``Plan``: the modules of a model that are split, and the places where activations change
their layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bmt_tp.plans.styles import Layout, Style


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How :func:`parallelize` splits a model of consecutive layers over the ranks along ``tp``.

    Modules are named by patterns. ``fnmatch`` matches each part between dots: ``*.mlp`` matches
    ``a.mlp`` and not ``a.b.mlp``. Activations have one of three layouts:

    - outside of the layers: (batch, sequence, features), the same on every rank;
    - inside of the layers, between attention and feed-forward modules: this rank's rows,
      (sequence / tp, batch, features). Norms, residual sums and dropout work on them;
    - inside of attention and feed-forward modules: all positions, with this rank's heads
      or features.
    """

    parameters: Mapping[str, Style]
    """The style of each module that has parameters, by pattern.

    Every parameter must be in a module that a pattern names. Only 1-D parameters inside of
    :attr:`layers` and :attr:`last`, as norms have, may be left out; they stay as they are.
    """

    layers: str
    """The consecutive layers. The first argument of each is the hidden states; the first layer
    splits them into rows.
    """

    last: str
    """The module after which hidden states are whole again: the norm after the layers, or the last
    layer if there is no norm.
    """

    gathered: Mapping[str, Layout] = field(default_factory=dict)
    """The modules inside of layers whose first argument (this rank's rows) is gathered once for
    several :class:`Column` layers.
    """

    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes, by module, that count heads or features; :func:`parallelize` divides them
    by ``tp_size``.
    """
