"""``attention``: attention of this rank's tokens to all tokens of the sequence."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.torch_internals import never_compiled
from bmt_cp.context_group import check_halves, context_group
from bmt_cp.exchange import gather_tokens, heads_to_tokens, tokens_to_heads
from bmt_cp.guards import CallFacts, inside_attention
from bmt_cp.rows import Documents, Mask, attend

Transport = Literal["all_to_all", "all_gather"]

# Keys and values of more bytes than this are gathered for some of their heads at a time.
_GATHERED_BYTES = 1 << 30


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    document_ids: torch.Tensor | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    transport: Transport | None = None,
) -> torch.Tensor:
    """Return softmax(query @ key.T * scale) @ value over all tokens of the sequence, for the tokens
    of this rank, (batch, heads, tokens, size). Collective over the ranks along ``cp``.

    ``query`` (batch, heads, tokens, size), ``key`` and ``value`` (batch, key heads, tokens, size)
    are those of this rank's tokens, as :func:`split` divides them; key heads must divide heads.
    ``causal``: a token sees itself and earlier ones. ``window``: it sees those nearer than so many
    tokens, itself among them. ``document_ids`` (batch, tokens of the whole sequence): it sees its
    own document; take what :func:`split` returned. ``dropout`` of the weights is drawn by each rank
    for itself, and ``scale`` is by default size ** -0.5. The product is that of torch's
    ``scaled_dot_product_attention``.

    ``transport``: ``"all_to_all"`` exchanges tokens for heads (DeepSpeed-Ulysses), and
    ``"all_gather"`` gathers keys and values, some heads at a time if they are large. By default the
    first where ``cp_size`` divides both numbers of heads, else the second. Without ranks along
    ``cp``, and before ``init_distributed()``, it is the attention of one process.

    Raises ``ValueError`` for shapes that do not fit and for dropout with a window or documents,
    :class:`ConfigError` for a transport that these heads cannot take.
    """
    _check(query, key, value, document_ids, window, dropout)
    if torch.compiler.is_compiling() and document_ids is None and window is None:
        check_halves(query.shape[2], CallFacts.ranks, "query, key and value have")
        if _chosen(transport, query, key, CallFacts.ranks) == "all_to_all":
            return _of_own_heads(query, key, value, Mask(causal), CallFacts.ranks, dropout, scale)
    return _uncompiled(query, key, value, causal, document_ids, window, dropout, scale, transport)


@never_compiled
def _uncompiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    document_ids: torch.Tensor | None,
    window: int | None,
    dropout: float,
    scale: float | None,
    transport: Transport | None,
) -> torch.Tensor:
    group = context_group()
    check_halves(query.shape[2], group.size, "query, key and value have")
    length = query.shape[2] * group.size
    if document_ids is not None and document_ids.shape != (query.shape[0], length):
        raise ValueError(
            f"document_ids must have shape {(query.shape[0], length)}, (batch, tokens of the whole"
            f" sequence), not {tuple(document_ids.shape)}. Take those that bmt.cp.split returned."
        )
    documents = None if document_ids is None else Documents.of(document_ids)
    mask = Mask(causal, window, documents)
    with inside_attention(has_documents=document_ids is not None):
        if group.size == 1:
            return attend(query, key, value, mask, begin=0, dropout=dropout, scale=scale)
        if _chosen(transport, query, key, group.size) == "all_to_all":
            return _of_own_heads(query, key, value, mask, group.size, dropout, scale)
        query, key, value = _cast([query, key, value])
        return _with_gathered_keys(query, key, value, mask, group, dropout, scale)


def _of_own_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    ranks: int,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    query, key, value = _cast([query, key, value])
    if ranks == 1:
        return attend(query, key, value, mask, begin=0, dropout=dropout, scale=scale)
    query, key, value = tokens_to_heads([query, key, value], ranks)
    found = attend(query, key, value, mask, begin=0, dropout=dropout, scale=scale)
    result: torch.Tensor = heads_to_tokens([found], ranks)[0]
    return result


def _cast(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Cast as autocast does: torch's function casts too, but not if it gets a CausalBias."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


def _with_gathered_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    group: Group,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    bytes_of_head = 2 * key[:, 0].numel() * key.element_size() * group.size
    at_once = max(1, _GATHERED_BYTES // bytes_of_head)
    groups = query.shape[1] // key.shape[1]
    chunk = query.shape[2] // 2
    begins = group.rank * chunk, (2 * group.size - 1 - group.rank) * chunk
    found = []
    for queries, keys, values in zip(
        torch.split(query, at_once * groups, 1),
        torch.split(key, at_once, 1),
        torch.split(value, at_once, 1),
        strict=True,
    ):
        keys, values = gather_tokens([keys, values], group)
        rows = [
            attend(part, keys, values, mask, begin=begin, dropout=dropout, scale=scale)
            for part, begin in zip(queries.chunk(2, 2), begins, strict=True)
        ]
        found.append(torch.cat(rows, 2))
    return torch.cat(found, 1)


def _chosen(
    transport: Transport | None, query: torch.Tensor, key: torch.Tensor, ranks: int
) -> Transport:
    divides = query.shape[1] % ranks == 0 and key.shape[1] % ranks == 0
    if transport is None:
        return "all_to_all" if divides else "all_gather"
    if transport not in get_args(Transport):
        raise ConfigError(f"transport must be one of {get_args(Transport)}, not {transport!r}.")
    if transport == "all_to_all" and not divides:
        raise ConfigError(
            f'transport="all_to_all" gives each of {ranks} ranks some heads, and'
            f" {query.shape[1]} heads and {key.shape[1]} key heads cannot be divided so. Leave"
            ' transport out, or take "all_gather".'
        )
    return transport


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor | None,
    window: int | None,
    dropout: float,
) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if (
        any(x.dim() != 4 for x in (query, key, value))
        or shapes[1][:3] != shapes[2][:3]
        or (shapes[0][0], shapes[0][2]) != (shapes[1][0], shapes[1][2])
        or shapes[0][1] % shapes[1][1]
        or shapes[0][3] != shapes[1][3]
    ):
        raise ValueError(
            "query must be (batch, heads, tokens, size), key and value (batch, key heads, tokens,"
            " size), of the same tokens, and key heads must divide heads. They are"
            f" {', '.join(map(str, shapes))}."
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, or None, not {window}.")
    if dropout > 0 and (window is not None or document_ids is not None):
        raise ValueError(
            f"dropout={dropout} of attention weights is for causal and full attention, not for one"
            " with a window or documents. Set the model's attention dropout to 0."
        )
