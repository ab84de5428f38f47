"""``AdamW``: Adam whose weight decay is decoupled for parameters of every type."""

from __future__ import annotations

from typing import Any, ClassVar

from bmt_optim.adam.optimizer import AdamOptimizer
from bmt_optim.adam.update_plan import OwnerUpdates


class AdamW(AdamOptimizer):
    """:class:`AdamOptimizer` with decoupled weight decay in every type: ``torch.optim.AdamW``, in
    every bit for float32 parameters.

    A step also multiplies the parameter by ``1 - lr * weight_decay``, whatever its type.
    :class:`AdamOptimizer` does so for half types only. Defaults are those of ``torch.optim.AdamW``.
    Parameters of half types have float32 masters, and all other arguments mean what they mean
    there. States of :class:`AdamOptimizer` and of torch's Adam and AdamW load; decay stays
    decoupled. Source: Loshchilov and Hutter 2019, Algorithm 2.

    >>> import torch
    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> parameter.grad = torch.zeros(1)
    >>> AdamW([parameter], lr=0.1, weight_decay=0.5).step()
    >>> parameter.detach()
    tensor([0.9500])
    """

    name: ClassVar[str] = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        hold_steps: int = 0,
        overlap_forward: bool | None = None,
        compact_master: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            hold_steps,
            decoupled_weight_decay=True,
            overlap_forward=overlap_forward,
            compact_master=compact_master,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch; raises :class:`ValueError` if it asks for
        L2 regularisation.
        """
        if param_group.get("decoupled_weight_decay", True) is not True:
            raise ValueError(
                f"decoupled_weight_decay of a group is {param_group['decoupled_weight_decay']}, and"
                " AdamW's decay is decoupled. Leave it out, or use AdamOptimizer."
            )
        super().add_param_group(param_group)

    def _updates(self) -> list[OwnerUpdates]:
        # A loaded state brings the option of the optimizer that saved it.
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
        return super()._updates()
