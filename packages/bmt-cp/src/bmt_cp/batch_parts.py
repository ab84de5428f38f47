"""``split`` and ``gather``: a batch of whole sequences, and the part of it that a rank computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import Runtime, current
from bmt_cp.context_group import check_halves, context_group, in_order, own_part
from bmt_cp.guards import CallFacts
from bmt_params.guards.same_data import Occasions, check_same

IGNORED = -100
"""The label of tokens without a loss, as in torch's ``cross_entropy``."""


class Part(dict[str, Any]):
    """What a model takes of this rank's tokens: the arguments of one of Hugging Face, by name.
    ``count`` is the number of its target tokens, a 0-dim tensor; None without labels.
    """

    count: torch.Tensor | None = None


def split(
    *,
    labels: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    causal: bool = True,
    **tokens: torch.Tensor,
) -> Part:
    """Return this rank's part of a batch that all ranks along ``cp`` have whole. In the first steps
    it compares the batches of these ranks, and is collective then.

    ``tokens`` are ``input_ids`` (batch, tokens), and whatever else has one entry for each token,
    (batch, tokens, ...). Sequences are padded at their end to a multiple of ``2 * cp_size``, with
    zeros. The part has, for the tokens of this rank:

    - ``tokens``, by their names;
    - ``position_ids``, by default 0, 1, 2, ... in each document;
    - with ``labels`` (batch, tokens), which are the tokens themselves, or -100 for those without a
      loss: ``shift_labels``, the label of the next token. They are shifted before the sequence is
      divided. ``labels`` and ``num_items_in_batch=1`` are there so that the ``loss`` of a model of
      Hugging Face is the *sum* over this rank's tokens, and the attribute ``count`` is their
      number: ``manager.backward(model(**part).loss, count=part.count)``;
    - ``document_ids`` of the *whole* sequence, for :func:`attention`: a document is a run of equal
      ids. Labels at the beginning of a
      document are kept: give -100 where its first token shall not be predicted.

    ``causal=False``: the model's attention is not causal. Then padding becomes a document of its
    own, so that no token sees it, and labels are those of the tokens themselves: there are no
    ``shift_labels``, and ``count`` counts ``labels``.

    Without ranks along ``cp`` the part is the whole batch. Raises ``ValueError`` for shapes that
    differ, other batches on the ranks along ``cp``, and positions that begin anew where no document
    does.
    """
    group = context_group()
    given = {"labels": labels, "position_ids": position_ids, "document_ids": document_ids}
    whole = {**tokens, **{name: x for name, x in given.items() if x is not None}}
    batch, length = _shape(whole, tokens)
    if position_ids is not None and position_ids.device.type == "cpu":
        _check_positions(position_ids, document_ids)
    if group.size > 1:
        _compare(whole, group)
    padded = -(-length // (2 * group.size)) * 2 * group.size if group.size > 1 else length
    device = next(iter(tokens.values())).device
    if document_ids is None and padded > length and not causal:
        document_ids = torch.zeros(batch, length, dtype=torch.int64, device=device)
    if position_ids is None:
        position_ids = _positions(document_ids, batch, length, device)
    part = Part()

    def add(name: str, x: torch.Tensor, filler: int = 0) -> None:
        part[name] = own_part(_pad(x, padded, filler), 1, group.size, group.rank)

    for name, x in tokens.items():
        add(name, x)
    add("position_ids", position_ids)
    if document_ids is not None:
        # Padding is a document of its own.
        padding = document_ids[:, -1:] + 1
        part["document_ids"] = torch.cat([document_ids, padding.expand(-1, padded - length)], 1)
    CallFacts.tokens, CallFacts.has_documents = padded // group.size, document_ids is not None
    CallFacts.has_own_positions = given["position_ids"] is not None
    if labels is not None:
        add("labels", labels, IGNORED)
        part["num_items_in_batch"] = 1
        if causal:
            add("shift_labels", F.pad(labels[:, 1:], (0, 1), value=IGNORED), IGNORED)
        part.count = (part["shift_labels" if causal else "labels"] != IGNORED).sum()
    return part


def gather(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Return ``x`` of all tokens, in order, where this rank's ``x`` has those of its part along
    ``dim``. Without a gradient: for evaluation. Collective over the ranks along ``cp``.

    Padding that :func:`split` has added is at the end.
    """
    group = context_group()
    if group.size == 1:
        return x.detach()
    check_halves(x.shape[dim], group.size, f"Dim {dim} of x has")
    with annotate("to gather tokens along cp"):
        return in_order(gather_stacked(x, group), dim)


class _Comparisons:
    """When a run compares the batches of ranks along ``cp``."""

    def __init__(self, runtime: Runtime) -> None:
        self.occasions = Occasions()


def _compare(whole: dict[str, torch.Tensor], group: Group) -> None:
    if not current().state(_Comparisons).occasions.has_come():
        return
    if "position_ids" in whole:  # the host waits for a GPU, so not in every step
        _check_positions(whole["position_ids"], whole.get("document_ids"))
    check_same(
        sorted(whole.items()),
        group,
        tolerance=0.0,
        what="batch for bmt.cp.split",
        advice="Ranks along cp compute parts of one batch: choose it by"
        " current().topology.data_rank and data_size, not by rank() and world_size().",
    )


def _check_positions(positions: torch.Tensor, document_ids: torch.Tensor | None) -> None:
    wrong = positions[:, 1:] != positions[:, :-1] + 1
    if document_ids is not None:
        wrong &= document_ids[:, 1:] == document_ids[:, :-1]
    if bool(wrong.any()):
        row, token = (int(index) for index in wrong.nonzero()[0])
        raise ValueError(
            f"position_ids[{row}, {token + 1}] is {int(positions[row, token + 1])} after"
            f" {int(positions[row, token])}, inside of one document. If a document begins there,"
            " say so: document_ids=. Positions of one document are consecutive."
        )


def _shape(whole: dict[str, torch.Tensor], tokens: dict[str, torch.Tensor]) -> tuple[int, int]:
    if not tokens:
        raise ValueError("split needs the tokens: split(input_ids=...).")
    shapes = {name: tuple(x.shape[:2]) for name, x in whole.items()}
    first = next(iter(shapes.values()))
    if len(first) < 2 or any(shape != first for shape in shapes.values()):
        shown = ", ".join(f"{name} {tuple(x.shape)}" for name, x in whole.items())
        raise ValueError(f"All tensors must be (batch, tokens, ...), of the same tokens: {shown}.")
    return first[0], first[1]


def _positions(
    document_ids: torch.Tensor | None, batch: int, length: int, device: torch.device
) -> torch.Tensor:
    index = torch.arange(length, device=device).expand(batch, length)
    if document_ids is None:
        return index
    is_new = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return index - torch.where(is_new, index, 0).cummax(1).values


def _pad(x: torch.Tensor, length: int, filler: int) -> torch.Tensor:
    missing = length - x.shape[1]
    if missing == 0:
        return x
    return torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), filler)], 1)
