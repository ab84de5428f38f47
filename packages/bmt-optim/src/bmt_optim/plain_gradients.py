"""Gradients of ordinary parameters, which no sharding engine reduces: summed over the ranks once per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bmt_core.comm.protocols import Group
from bmt_core.params.parameter import DistributedParameter

# Elements per all-reduce: bounds the flat copy to 64 MiB in float32.
MAX_ELEMENTS = 1 << 24

_FRESH, _SUMMED, _SPARSE = range(3)


class PlainGradients:
    """Sums the local gradients of parameters that are not :class:`DistributedParameter`, and remembers which are done.

    An ordinary parameter gets the gradient that a distributed one in its place would get: the sum over all ranks, formed in
    float32 for half types. Where one rank has no gradient and another has, the first one contributes zero, so that either all
    ranks have the gradient afterwards or none.
    """

    def __init__(self) -> None:
        # The gradients themselves, not only their owners: a gradient that was replaced since is fresh again.
        self._summed: dict[torch.nn.Parameter, torch.Tensor] = {}

    def forget(self) -> None:
        """Take all gradients for local again: a step has ended, or a new one begins."""
        self._summed.clear()

    @torch.no_grad()
    def sum(self, parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
        """Sum the gradients of ``parameters`` over ``group`` unless that is done. Collective when there are any."""
        plain = [p for p in parameters if not isinstance(p, DistributedParameter)]
        if group.size == 1 or not plain:
            return
        fresh = self._agree(plain, group)
        for bucket in _buckets(fresh):
            _sum_bucket(bucket, group)
        for p in fresh:
            assert p.grad is not None
            self._summed[p] = p.grad

    def _agree(self, plain: Sequence[torch.nn.Parameter], group: Group) -> list[torch.nn.Parameter]:
        """Return those that have a local gradient on any rank. The table lives on the host, so that no device has to wait."""
        table = torch.zeros(3, len(plain), dtype=torch.uint8)
        for row, column in self._places(plain):
            table[row, column] = 1
        group.all_reduce(table, "max").wait()
        if table[_SPARSE].any():
            raise TypeError(
                f"Parameter {int(table[_SPARSE].argmax())} has a sparse gradient on some rank. Make it dense."
            )
        torn = table[_FRESH] & table[_SUMMED]
        if torn.any():
            raise RuntimeError(
                f"The gradient of parameter {int(torn.argmax())}, of shape {tuple(plain[int(torn.argmax())].shape)}, was"
                " replaced between clip_grad_norm() and step() on some ranks and not on others."
            )
        return [p for p, has_gradient in zip(plain, table[_FRESH].tolist(), strict=True) if has_gradient]

    def _places(self, plain: Sequence[torch.nn.Parameter]) -> Iterator[tuple[int, int]]:
        for column, p in enumerate(plain):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                yield _SPARSE, column
            yield _SUMMED if self._summed.get(p) is p.grad else _FRESH, column


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault((p.device, p.dtype), []).append(p)
    for members in groups.values():
        bucket: list[torch.nn.Parameter] = []
        elements = 0
        for p in members:
            if bucket and elements + p.numel() > MAX_ELEMENTS:
                yield bucket
                bucket, elements = [], 0
            bucket.append(p)
            elements += p.numel()
        yield bucket


def _sum_bucket(parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
    grads = []
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grads.append(p.grad)
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads])
    group.all_reduce(flat).wait()
    parts = torch.split(flat, [grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])
