"""``OptimManager.unscaled_gradients``: gradients as plain torch has them, whatever the
loss scale.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_core.run.runtime import current
from bmt_optim import AdamW, OptimManager
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from cells import cells

ROWS, WIDTH, MAX_NORM = 4, 3, 0.02


class Model(DistributedModule):
    """A sharded matrix, an ordinary bias, and a parameter that is not used."""

    def __init__(self, kind: type[torch.nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.weight = kind(torch.randn(WIDTH, 5, generator=numbers).to(dtype))
        self.bias = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
        self.unused = kind(torch.zeros(2, dtype=dtype))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight + self.bias).float().square().mean()


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def in_plain_torch(dtype: torch.dtype, *, is_clipped: bool) -> dict[str, torch.Tensor]:
    model = Model(torch.nn.Parameter, dtype)
    model.loss(rows()).backward()  # type: ignore[no-untyped-call]
    if is_clipped:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@on_ranks(2)
@cells("is_clipped", [False, True])
@cells(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_gradients_without_the_loss_scale_are_those_of_plain_torch(
    dtype: torch.dtype, tolerance: float, is_clipped: bool
) -> None:
    expected = in_plain_torch(dtype, is_clipped=is_clipped)
    model: Any = Model(DistributedParameter, dtype)
    manager = OptimManager(loss_scale=256.0)
    manager.add_optimizer(AdamW(model.parameters(), lr=0.1))
    topology = current().topology
    manager.backward(model.loss(rows().chunk(topology.data_size)[topology.data_rank]))
    if is_clipped:
        manager.clip_grad_norm(model.parameters(), MAX_NORM)
    params: dict[str, Any] = dict(model.named_parameters())
    of_params = dict(manager.unscaled_gradients(params.values()))
    found = {name: of_params[p] for name, p in params.items() if p in of_params}
    assert list(found) == ["weight", "bias"] and len(of_params) == 2
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    wholes = {**found, "weight": params["weight"].gather_like(found["weight"])}
    torch.testing.assert_close(wholes, expected, rtol=tolerance, atol=tolerance / 100)
    before = params["bias"].grad.clone()
    found["bias"].zero_()  # copies, so that the step has what it had
    assert torch.equal(params["bias"].grad, before) and bool(before.any())
