"""``VPEmbedding``: an embedding whose vocabulary is split over the ranks along ``tp``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import current
from bmt_core.torch_internals import never_compiled
from bmt_core.user_warnings import warn_user
from bmt_params import DistributedModule, DistributedParameter, Locality, ParameterInitializer
from bmt_params.guards.same_data import Occasions
from bmt_tp.linear_function import parallel_linear, sequence_first
from bmt_tp.row_comparison import check_own_rows, is_time_to_compare
from bmt_tp.tensor_group import AXIS, own_share, tensor_group, tensor_ranks


class VPEmbedding(DistributedModule):
    """A table (vocab_size, embedding_size), split by tokens: each rank along ``tp`` has the vectors
    of vocab_size / tp tokens.

    Called with this rank's ids (rows / tp, ...), it returns their vectors (rows / tp, ...,
    embedding_size). Every rank gathers the ids of all ranks and looks them up in its part of the
    table; a reduce-scatter then gives each rank the vectors of its own ids. Each rank receives
    (tp - 1)/tp * rows * embedding_size elements; the table is never sent. An id outside the
    vocabulary raises ``IndexError`` on the CPU. On CUDA its vector is NaN, so that
    :class:`OptimManager` skips the step.

    With ``projection`` it takes vectors (rows / tp, ..., embedding_size) and returns logits (rows,
    ..., vocab_size / tp) for all rows, in their order, and this rank's part of the vocabulary: the
    input of ``FusedCrossEntropy(parallel=True)``.

    Rows are dim 0, as in (sequence / tp, batch), or dim 1 after
    ``init_distributed(sequence_dim=1)``, as in (batch, sequence / tp). If neither was declared, and
    a call could mean both, it warns once.

    ``init_parameters`` draws from the normal distribution of ``init_mean`` and ``init_std``. Raises
    :class:`ConfigError` if tp does not divide ``vocab_size``.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
    ) -> None:
        super().__init__()
        self._has_warned = False
        self._occasions = Occasions()
        self._projection_occasions = Occasions()
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        # On the meta device: it has no values, and is refused until something initialises it.
        self.weight = DistributedParameter(
            torch.empty(
                own_share(vocab_size, "vocab_size"), embedding_size, dtype=dtype, device="meta"
            ),
            init_method=ParameterInitializer(torch.nn.init.normal_, mean=init_mean, std=init_std),
            locality=[Locality(AXIS, split_dim=0)],
        )

    def forward(self, x: torch.Tensor, projection: bool = False) -> torch.Tensor:
        """Look up ids, or with ``projection`` compute logits from vectors. Collective over tp."""
        ranks = tensor_ranks()
        if ranks.size > 1 and not self._has_warned:
            self._warn_of_undeclared_sequence_dim(x)
        if projection:
            return parallel_linear(
                x,
                self.weight,
                gather_input=True,
                occasions=self._projection_occasions,
                sequence_dim=ranks.sequence_dim,
            )
        if ranks.size == 1 or ranks.sequence_dim == 0:
            return split_lookup(x, self.weight, scattered=True, occasions=self._occasions)
        found = split_lookup(
            sequence_first(x, 2), self.weight, scattered=True, occasions=self._occasions
        )
        return found.transpose(0, 1)

    @never_compiled
    def _warn_of_undeclared_sequence_dim(self, x: torch.Tensor) -> None:
        run = current()
        if run.settings.sequence_dim is None and x.dim() > 1 and min(x.shape[:2]) > 1:
            self._has_warned = True
            if run.rank == 0:
                warn_user(
                    f"VPEmbedding takes {tuple(x.shape)} for (sequence / tp, batch, ...): rows, of"
                    " which each rank along 'tp' has a part, are dim 0. If this is (batch, sequence"
                    " / tp, ...), as in BMTrain's examples, sequences are mixed up: start with"
                    " init_distributed(sequence_dim=1). If it is right, sequence_dim=0 says so."
                    " This is said once."
                )

    def extra_repr(self) -> str:
        """Show the sizes in ``repr``."""
        return f"{self.vocab_size}, {self.embedding_size}"


@never_compiled
def split_lookup(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    scattered: bool,
    padding_idx: int | None = None,
    occasions: Occasions | None = None,
) -> torch.Tensor:
    """Return the vectors of ``ids``; ``weight`` (vocabulary / tp, features) is this rank's part of
    the table.

    With ``scattered``, ids and vectors are this rank's rows; otherwise they are all rows, the same
    on every rank. The vector of ``padding_idx`` gets no gradient. ``occasions`` is as in
    :func:`bmt_tp.linear_function.parallel_linear`. Collective.
    """
    group = tensor_group()
    if scattered and group.size > 1:
        if torch.is_grad_enabled() and is_time_to_compare(occasions):
            check_own_rows(ids, "VPEmbedding")
        ids = gather_stacked(ids, group).flatten(0, 1)
    if ids.device.type == "cpu" and ids.numel():
        _check_ids(ids, len(weight) * group.size)  # the ids of all ranks, so that all ranks raise
    if group.size == 1:
        return embedding(ids, weight, padding_idx)
    column = ids - group.rank * len(weight)
    is_here = (column >= 0) & (column < len(weight))
    padding = None if padding_idx is None else padding_idx - group.rank * len(weight)
    own_padding = padding if padding is not None and 0 <= padding < len(weight) else None
    vectors = embedding(column.clamp(0, len(weight) - 1), weight, own_padding).masked_fill(
        ~is_here.unsqueeze(-1), 0
    )
    if ids.device.type != "cpu":
        is_nowhere = (ids < 0) | (ids >= len(weight) * group.size)
        vectors = vectors.masked_fill(is_nowhere.unsqueeze(-1), math.nan)
    joined: torch.Tensor = _JoinVectors.apply(vectors, group, scattered)  # type: ignore[no-untyped-call]
    return joined


class _JoinVectors(torch.autograd.Function):
    """The sum of ``vectors`` over the ranks: one rank has the values of a vector, the others have
    zeros in its place.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, group: Group, scattered: bool) -> torch.Tensor:
        ctx.group, ctx.scattered = group, scattered
        if not scattered:
            group.all_reduce(vectors).wait()
            ctx.mark_dirty(vectors)
            return vectors
        own = vectors.new_empty((len(vectors) // group.size, *vectors.shape[1:]))
        group.reduce_scatter(own.view(-1), vectors.view(-1)).wait()
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if not ctx.scattered:
            return grads[0], None, None
        return gather_stacked(grads[0], ctx.group).flatten(0, 1), None, None


def _check_ids(ids: torch.Tensor, vocabulary: int) -> None:
    least, largest = int(ids.min()), int(ids.max())
    if least < 0 or largest >= vocabulary:
        wrong = least if least < 0 else largest
        raise IndexError(
            f"Id {wrong} is out of range: the vocabulary has {vocabulary} entries, 0 to"
            f" {vocabulary - 1}."
        )
