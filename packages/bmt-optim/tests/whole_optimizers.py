"""Optimizers that need whole tensors, as their authors would write them, and a training of them for
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from bmt_params.parameter import DistributedParameter

SHAPES = {
    "odd": (3, 5),
    "tall": (17, 2),
    "square": (4, 4),
    "wide": (2, 31),
    "one": (1, 1),
    "tied": (6, 7),
}


class Shampoo(torch.optim.Optimizer):
    """Shampoo for matrices, with preconditioners in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["statistics"] = [torch.eye(size, dtype=p.dtype) for size in p.shape]
                    state["momentum"] = torch.zeros_like(p)
                left, right = state["statistics"]
                left += p.grad @ p.grad.T
                right += p.grad.T @ p.grad
                update = _inverse_fourth_root(left) @ p.grad @ _inverse_fourth_root(right)
                state["momentum"].mul_(0.9).add_(update)
                p -= group["lr"] * state["momentum"]


class Normalized(torch.optim.Optimizer):
    """A step of the length ``lr``, shorter with every step, which it counts in its group, as many
    packages do.
    """

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p -= group["lr"] / group["step"] * p.grad / p.grad.norm()


class GlobalStepSize(torch.optim.Optimizer):
    """Prodigy's kind: one step size, kept in the group, from all tensors of the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            squares = [float(grad.square().sum()) for grad in grads]
            group["d"] = 0.9 * group["d"] + sum(squares) ** 0.5
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / group["d"] * p.grad


class GlobalClip(torch.optim.SGD):
    """Clips by the norm of all gradients, which leaves no trace in groups and states."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(
            [p for group in self.param_groups for p in group["params"]], 0.5
        )
        super().step()


class Codes(torch.Tensor):
    """Numbers of 8 bits and their scale, a tensor that consists of two, as torchao's states do."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        made: Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Codes:
        scale = values.abs().amax().clamp(min=1e-12).view(1) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def dequantize(self) -> torch.Tensor:
        return self.codes * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["codes", "scale"], "context"

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, torch.Tensor], context: str, shape: Any, stride: Any
    ) -> Codes:
        assert context == "context" and shape == tensors["codes"].shape
        assert stride == tensors["codes"].stride()
        return cls(tensors["codes"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of {cls.__name__}")


torch.serialization.add_safe_globals([Codes])  # as torchao does with its own


class EightBit(torch.optim.Optimizer):
    """Has a momentum of 8 bits."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    found = self.state[p].get("momentum")
                    old = torch.zeros_like(p) if found is None else found.dequantize()
                    self.state[p]["momentum"] = new = Codes.of(old * 0.9 + p.grad)
                    p -= group["lr"] * new.dequantize()


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "Shampoo": Shampoo,
    "Normalized": Normalized,
}


def values(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def plain_parameters(dtype: torch.dtype = torch.float64) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(value) for name, value in values(dtype).items()}


def sharded_parameters(
    dtype: torch.dtype = torch.float64, ordinary: Iterable[str] = ("square",)
) -> dict[str, torch.nn.Parameter]:
    """Sharded parameters, but for those named ``ordinary``."""
    return {
        name: torch.nn.Parameter(value) if name in ordinary else DistributedParameter(value)
        for name, value in values(dtype).items()
    }


def give_gradients(params: dict[str, torch.nn.Parameter], step: int, *, scale: float = 1.0) -> None:
    """Give each parameter its part of a whole gradient; now and then ``odd`` and ``one`` none."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, p in params.items():
        whole = (
            torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(p.dtype) * scale
        )
        if (name == "odd" and step % 3 == 1) or (name == "one" and step < 2):
            p.grad = None
        elif isinstance(p, DistributedParameter):
            p.grad = p.local_part(whole).clone()
        else:
            p.grad = whole


def wholes(params: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {
        name: (
            p.gather_like(p.detach()) if isinstance(p, DistributedParameter) else p.detach()
        ).clone()
        for name, p in params.items()
    }


def assert_alike(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12
) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def _inverse_fourth_root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values.clamp(min=1e-6).pow(-0.25)[:, None] * vectors.T)
