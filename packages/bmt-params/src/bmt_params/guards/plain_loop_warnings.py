"""Warnings for loops that call ``loss.backward()`` and ``optimizer.step()`` themselves, as in
plain torch.

Such a loop expects gradients of the mean loss. In a run that sums gradients they are larger by the
number of ranks, unless an ``OptimManager`` has scaled the loss. And gradients of ordinary
parameters are not summed over ranks without a manager. Groups by ``p.dim()`` are refused, as
:meth:`OptimManager.add_optimizer` refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import Optimizer

from bmt_core.run.runtime import Runtime
from bmt_core.user_warnings import warn_user
from bmt_params.guards.ndim_groups import check_groups_by_ndim
from bmt_params.guards.same_data import differ, fingerprints_of_ranks
from bmt_params.models_of_run import ModelsOfRun
from bmt_params.parameter import DistributedParameter

_ALIKE = 1e-2  # relative to the norm: more than ranks differ that compute the same


class PlainLoops:
    """Checks the first step of an optimizer with gradients of distributed parameters, in a run
    without an ``OptimManager``.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.are_checked = False

    def check(self, optimizer: Optimizer) -> None:
        """Before a step: warn once, on rank 0, if it uses gradients that differ from those of plain
        torch.
        """
        if self._runtime.state(ModelsOfRun).scaled_losses:
            self.are_checked = True
            return
        trained = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        ordinary = [p for p in trained if not isinstance(p, DistributedParameter)]
        if len(ordinary) == len(trained):
            return
        check_groups_by_ndim(optimizer.param_groups)
        self.are_checked = True
        drift = len(ordinary) if self._drift_apart(ordinary) else 0
        if self._runtime.rank == 0:
            self._warn(type(optimizer).__name__, drift)

    def _drift_apart(self, ordinary: Sequence[torch.Tensor]) -> bool:
        """Whether ranks have different gradients of these parameters. Collective if all ranks
        compute the same loss.
        """
        # Ranks that see different data have different gradients: nothing need be compared.
        if self._runtime.topology.sum_size > 1 or not ordinary:
            return bool(ordinary)
        gradients = [
            p.grad.to_dense() if p.grad.is_sparse else p.grad
            for p in ordinary
            if p.grad is not None
        ]
        found = fingerprints_of_ranks(
            gradients, self._runtime.world, "to compare gradients of ordinary parameters"
        )
        return bool(differ(found, _ALIKE).any())

    def _warn(self, optimizer: str, ordinary: int) -> None:
        topology, texts = self._runtime.topology, []
        size, parts = topology.data_size, topology.parts_axes
        if parts:
            texts.append(
                f"{optimizer} takes a step with gradients of which each rank along {parts[0]!r} has"
                " computed a part. They are those of the sum of all ranks' losses. Unless you"
                " divided these by the number of tokens of all ranks, let an OptimManager do it:"
                " manager.backward(loss_sum, count=tokens) and manager.step()."
            )
        elif self._runtime.gradient_divisor == 1 and size > 1:
            texts.append(
                f"{optimizer} takes a step with gradients that are sums over {size} ranks: {size}"
                " times those of the mean loss,"
                " unless you divided the loss by that. Start with"
                ' init_distributed(gradients="mean"), or let an OptimManager do'
                " it: manager.backward(loss) and manager.step()."
            )
        if ordinary:
            texts.append(
                f"{ordinary} of its parameters are ordinary ones, whose gradients are those of each"
                " rank alone, so that ranks drift apart, unless you reduce them: an OptimManager"
                " does, and BMTrainModelWrapper leaves no ordinary parameters."
            )
        if texts:
            warn_user(" ".join([*texts, "This is said once."]))
