"""``KINDS``: the kinds of things that plugins offer by name, one :class:`OfferKind` per hook that
returns classes or commands.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bmt_core.comm.protocols import CommBackend
from bmt_core.errors import PluginError
from bmt_core.ops.provider import KernelProvider
from bmt_core.settings import MeshAxis


@dataclass(frozen=True, kw_only=True)
class OfferKind:
    """One kind of thing that plugins offer. An offer is a subclass of ``base``, or an instance if
    ``offers_instances``.
    """

    name: str
    hook: str
    base: type
    offers_instances: bool = False


# A checkpoint format may be any class here, and a command any object with a name: who uses them has
# the base class.
KINDS = {
    kind.name: kind
    for kind in (
        OfferKind(name="comm backend", hook="bmt_comm_backends", base=CommBackend),
        OfferKind(name="kernel provider", hook="bmt_kernel_providers", base=KernelProvider),
        OfferKind(name="optimizer", hook="bmt_optimizers", base=torch.optim.Optimizer),
        OfferKind(name="checkpoint format", hook="bmt_checkpoint_formats", base=object),
        OfferKind(name="command", hook="bmt_cli_commands", base=object, offers_instances=True),
    )
}
# Not in KINDS, because axes depend on the settings of a run: plugins are asked in each run.
AXIS = OfferKind(name="axis", hook="bmt_mesh_axes", base=MeshAxis, offers_instances=True)


def check_offers(kind: OfferKind, offers: object, plugin: str) -> list[tuple[str, Any]]:
    """Return ``offers``, which ``plugin`` returned from the hook, as (name, offer) pairs;
    PluginError if they are wrong.
    """
    if not isinstance(offers, Sequence) or isinstance(offers, str):
        raise PluginError(
            f"The {plugin} must return a list from {kind.hook}(), it returned {offers!r}."
        )
    return [(_checked_name(kind, offer, plugin), offer) for offer in offers]


def _checked_name(kind: OfferKind, offer: Any, plugin: str) -> str:
    if kind.offers_instances:
        fits, wanted = isinstance(offer, kind.base), f"{kind.base.__name__} objects"
    else:
        fits, wanted = (
            isinstance(offer, type) and issubclass(offer, kind.base),
            f"subclasses of {kind.base.__name__}",
        )
    if not fits:
        raise PluginError(
            f"The {plugin} must return {wanted} from {kind.hook}(), it returned {offer!r}."
        )
    if inspect.isabstract(offer):
        missing = ", ".join(sorted(offer.__abstractmethods__))
        raise PluginError(
            f"The {plugin} offers the {kind.name} {offer.__qualname__}, which does not"
            f" implement: {missing}."
        )
    name = getattr(offer, "name", None)
    if not isinstance(name, str) or not name:
        raise PluginError(
            f"The {plugin} offers the {kind.name} {offer!r}, which needs an attribute 'name'"
            " (a text)."
        )
    return name
