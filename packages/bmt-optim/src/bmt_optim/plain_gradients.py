"""Gradients of ordinary parameters, which no sharding engine reduces: summed over the ranks once
per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bmt_core.comm.protocols import Group
from bmt_core.user_warnings import warn_user
from bmt_params.guards.equal_values import check_equal_values
from bmt_params.guards.gradient_comparison import GradientComparison
from bmt_params.parameter import DistributedParameter

# Elements per all-reduce: bounds the flat copy to 64 MiB in float32.
MAX_ELEMENTS = 1 << 24

_LOCAL, _SUMMED, _SPARSE, _AS_SHARDED = range(4)


class PlainGradients:
    """Sums local gradients of parameters that are not :class:`DistributedParameter`, and remembers
    which gradients are summed.

    An ordinary parameter gets the gradient that a distributed one would get: the sum over all
    ranks, formed in float32 for half types, divided by the run's divisor. If only some ranks have a
    gradient, the others contribute zero, so that afterwards either all ranks have it or none. Where
    no loss was scaled and no parameter is distributed, another divisor makes it the mean.

    Gradients that the program itself has reduced are equal on all ranks. If all gradients of the
    first sum are, rank 0 warns. Values are compared when a parameter is first met: equal gradients
    keep parameters alike only if they begin alike.
    """

    def __init__(self) -> None:
        self._are_compared = False
        self._comparison = GradientComparison()
        self._known: dict[torch.nn.Parameter, None] = {}
        # The gradient objects, because a gradient that was assigned later is local again.
        self.summed: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._divisor = 1.0  # of the last sum

    def forget(self) -> None:
        """Treat all gradients as local again: a step has ended, or a new one begins."""
        self.summed.clear()

    @torch.no_grad()
    def share_out(self, group: Group) -> None:
        """Divide summed gradients into equal shares per rank, before a backward pass adds local
        gradients to them.
        """
        grads = [grad for p, grad in self.summed.items() if p.grad is grad]
        if grads and self._divisor != group.size:
            torch._foreach_div_(grads, group.size / self._divisor)
        self.forget()

    @torch.no_grad()
    def sum(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        divisor: float,
        unscaled_divisor: float,
        *,
        has_scaled: bool,
    ) -> None:
        """Sum those gradients of ``parameters`` over ``group`` that are not summed. Collective if
        any parameter is ordinary.

        ``has_scaled``: whether this rank has scaled a loss. If no rank has, and none of
        ``parameters`` is distributed on any rank, the sum is divided by ``unscaled_divisor``.
        """
        plain = [p for p in parameters if not isinstance(p, DistributedParameter)]
        if not plain or group.size == 1:
            return
        is_local, is_as_sharded = self._local_on_any_rank(
            plain, group, has_scaled or len(plain) < len(parameters)
        )
        if not is_as_sharded:
            divisor = unscaled_divisor
        self._compare_first_values(plain, group)
        unsummed = [p for p, summand in zip(plain, is_local, strict=True) if summand]
        if unsummed:
            self._comparison.check(
                unsummed,
                lambda: [torch.zeros_like(p) if p.grad is None else p.grad for p in unsummed],
            )
        # With divisor == group.size the result is the mean, which leaves gradients that are equal
        # already as they are.
        if unsummed and not self._are_compared and divisor != group.size:
            self._are_compared = True
            _warn_if_alike(unsummed, group)
        self._divisor = divisor if unsummed else self._divisor
        for bucket in _buckets(unsummed):
            _sum_bucket(bucket, group, divisor)
        for p in unsummed:
            assert p.grad is not None
            self.summed[p] = p.grad

    def _compare_first_values(self, plain: Sequence[torch.nn.Parameter], group: Group) -> None:
        """Raise :class:`ConfigError` on all ranks if a parameter that was not met before has other
        values on one of them.
        """
        new = [
            (f"ordinary parameter {number} of shape {tuple(p.shape)}", p)
            for number, p in enumerate(plain)
            if p not in self._known
        ]
        if new:
            check_equal_values(
                new,
                group,
                "Its copies would stay different, and a file would have one of them. Ranks that"
                " have layers of their own, as stages have, draw other random numbers: make such"
                " parameters (adapters of a head, for one) before the layers are divided among"
                " ranks, or send them to all ranks:"
                " parameter.data.copy_(bmt.distributed.broadcast(parameter.data, 0)).",
            )
            self._known |= dict.fromkeys(plain)

    def _local_on_any_rank(
        self, plain: Sequence[torch.nn.Parameter], group: Group, is_as_sharded: bool
    ) -> tuple[list[int], bool]:
        """Return which gradients some rank has that are not summed, and whether ``is_as_sharded``
        on any rank.
        """
        # The table is on the host, so that no device has to wait.
        table = torch.zeros(4, len(plain), dtype=torch.uint8, device="cpu")
        table[_AS_SHARDED] = is_as_sharded
        for column, p in enumerate(plain):
            if p.grad is not None:
                table[_SPARSE, column] = p.grad.is_sparse
                table[_SUMMED if self.summed.get(p) is p.grad else _LOCAL, column] = 1
        group.all_reduce(table, "max").wait()
        if table[_SPARSE].any():
            position = int(table[_SPARSE].argmax())
            raise TypeError(
                f"Parameter {position}, of shape {tuple(plain[position].shape)}, has a sparse"
                " gradient on some rank. Make it dense: sparse=False in the embedding."
            )
        torn = table[_LOCAL] & table[_SUMMED]
        if torn.any():
            position = int(torn.argmax())
            raise RuntimeError(
                f"The gradient of parameter {position}, of shape {tuple(plain[position].shape)},"
                " was replaced between clip_grad_norm() and step() on some ranks and not on others."
                " Do it on every rank."
            )
        return table[_LOCAL].tolist(), bool(table[_AS_SHARDED].any())


def _warn_if_alike(parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
    """Warn on rank 0 if each gradient has equal norms on all ranks and any is not 0. Collective;
    the host waits for the device.
    """
    norms = torch.tensor(
        [0.0 if p.grad is None else float(p.grad.norm()) for p in parameters],
        dtype=torch.float64,
        device="cpu",
    )
    extremes = torch.stack([norms, -norms])
    group.all_reduce(extremes, "max").wait()
    largest, smallest = extremes[0], -extremes[1]
    if group.rank == 0 and largest.any() and torch.equal(largest, smallest):
        warn_user(
            f"The gradients of the {len(parameters)} ordinary parameters are alike on all"
            f" {group.size} ranks, as if the program had reduced them, and OptimManager sums them"
            " over the ranks once more. Leave that to it, or pass"
            " OptimManager(sum_plain_gradients=False). If all ranks have the same data, all is"
            " well. This is said once."
        )


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield ``parameters`` by device and dtype, in lists of at most ``MAX_ELEMENTS`` elements or of
    one parameter.
    """
    filling: dict[Any, tuple[list[torch.nn.Parameter], int]] = {}
    for p in parameters:
        bucket, elements = filling.get((p.device, p.dtype), ([], 0))
        if bucket and elements + p.numel() > MAX_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(p)
        filling[p.device, p.dtype] = bucket, elements + p.numel()
    for bucket, _ in filling.values():
        yield bucket


def _sum_bucket(parameters: Sequence[torch.nn.Parameter], group: Group, divisor: float) -> None:
    grads = []
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grads.append(p.grad)
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads])
    group.all_reduce(flat).wait()
    if divisor != 1:
        flat /= divisor
    parts = torch.split(flat, [grad.numel() for grad in grads])
    torch._foreach_copy_(
        grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)]
    )
