"""Attention of some rows of a sequence, the queries, to keys and values of all of it: torch's
``scaled_dot_product_attention``, given the keys that the rows see.

Rows with a window or with documents are computed in blocks of :data:`ROWS`. A block gets the keys
from the first to the last one that any of its rows sees, and a mask of its own, so that memory
grows with the length of a document or of the window, and not with that of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.weak import WeakTensorKeyDictionary

from bmt_core.torch_internals import version_of

ROWS = 1024


class Documents:
    """Which tokens of packed sequences are of one document: a run of equal ``ids`` (batch, tokens).

    ``numbers`` (batch, tokens) count the documents of a row. ``firsts[i]`` is the first token of
    the document of token i, ``lasts[i]`` its last one, the furthest over the batch; both lie on the
    host.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        index = torch.arange(ids.shape[1], device=ids.device)
        is_new = torch.ones_like(ids, dtype=torch.bool)
        is_new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        self.numbers = is_new.cumsum(1)
        ends = torch.ones_like(is_new)
        ends[:, :-1] = is_new[:, 1:]
        firsts = torch.where(is_new, index, 0).cummax(1).values
        lasts = torch.where(ends, index, ids.shape[1]).flip(1).cummin(1).values.flip(1)
        self.firsts: list[int] = firsts.amin(0).tolist()
        self.lasts: list[int] = lasts.amax(0).tolist()

    @classmethod
    def of(cls, ids: torch.Tensor) -> Documents:
        """Return the documents of ``ids``, found once for all layers."""
        version, documents = _known.get(ids, (None, None))
        if documents is None or version != version_of(ids):
            documents = cls(ids)
            _known[ids] = version_of(ids), documents
        found: Documents = documents
        return found


_known: Any = WeakTensorKeyDictionary()  # by the tensor of ids: its version, and the documents


@dataclass(frozen=True)
class Mask:
    """Which keys a row sees: those before it and itself (``causal``), those nearer than ``window``
    tokens, those of its document.
    """

    causal: bool
    window: int | None = None
    documents: Documents | None = None

    def keys_of(self, begin: int, end: int, length: int) -> tuple[int, int]:
        """Return the first key that any of the rows from ``begin`` to ``end`` sees, and the one
        after the last.
        """
        first, last = 0, end if self.causal else length
        if self.window is not None:
            first, last = max(first, begin - self.window + 1), min(last, end + self.window - 1)
        if self.documents is not None:
            first = max(first, self.documents.firsts[begin])
            last = min(last, self.documents.lasts[end - 1] + 1)
        return first, last

    def of(
        self, rows: tuple[int, int], keys: tuple[int, int], device: torch.device
    ) -> torch.Tensor:
        """Return which of ``keys`` each of ``rows`` sees, (1 or batch, 1, rows, keys)."""
        row = torch.arange(*rows, device=device)[:, None]
        key = torch.arange(*keys, device=device)
        seen = row >= key if self.causal else torch.ones_like(row >= key)
        if self.window is not None:
            seen &= (row - key).abs() < self.window
        if self.documents is None:
            return seen[None, None]
        numbers = self.documents.numbers
        same = numbers[:, slice(*rows), None] == numbers[:, None, slice(*keys)]
        return (seen & same)[:, None]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    *,
    begin: int,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention (batch, heads, rows, size) of the rows from ``begin`` on, ``query``
    (batch, heads, rows, size), to ``key`` and ``value`` (batch, key heads, tokens, size).
    """
    end, length = begin + query.shape[2], key.shape[2]
    if mask.window is None and mask.documents is None:
        if not mask.causal:
            return _product(query, key, value, dropout=dropout, scale=scale)
        key, value = key[:, :, :end], value[:, :, :end]
        if begin == 0:
            return _product(query, key, value, is_causal=True, dropout=dropout, scale=scale)
        bias = causal_lower_right(end - begin, end)
        return _product(query, key, value, bias, dropout=dropout, scale=scale)
    found = []
    for first in range(begin, end, ROWS):
        rows = first, min(first + ROWS, end)
        keys = mask.keys_of(*rows, length)
        seen = slice(*keys)
        found.append(
            _product(
                query[:, :, rows[0] - begin : rows[1] - begin],
                key[:, :, seen],
                value[:, :, seen],
                mask.of(rows, keys, query.device),
                dropout=dropout,
                scale=scale,
            )
        )
    return torch.cat(found, 2)


def _product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and query.device.type == "cuda":
        # The fast kernels for masks take no grouped heads.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=groups > 1,
    )
