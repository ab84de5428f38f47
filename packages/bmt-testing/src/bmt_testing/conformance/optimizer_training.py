"""``OptimizerTraining``: a few parameters that the optimizer under test steps, of which the ranks
have parts or one process the whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bmt_core.run.runtime import current, is_initialized
from bmt_optim import OptimManager, whole
from bmt_params.guards.optimizer_kind import Needs, kind_of
from bmt_params.parameter import DistributedParameter
from bmt_testing.conformance.offer import Offer

MATRICES = {"first": (12, 20), "second": (7, 9)}
OTHERS = {"long": (47,), "cube": (2, 3, 4)}
# Of the way that the parameters went. A kernel computes the last elements of a tensor by other
# instructions than the first, and an optimizer may compute in float32 what is float64.
SAME = 1e-5

Shapes = Mapping[str, tuple[int, ...]]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class OptimizerSubject:
    """The optimizer under test, and what it takes: its class, ``shapes`` and what it ``needs``."""

    offer: Offer
    needs: Needs
    reason: str
    needs_closure: bool
    shapes: Shapes
    size: float
    """Of parameters that a step moves by more than a half type rounds."""

    @classmethod
    def of(cls, offer: Offer) -> OptimizerSubject:
        """Find out what the optimizer takes: parameters of all shapes, or matrices alone."""
        found = offer.find()
        shapes: Shapes = {**MATRICES, **OTHERS}
        try:
            optimizer = found(first_values(shapes).values(), **offer.options)
        except ValueError:  # as torch's Muon
            shapes = MATRICES
            optimizer = found(first_values(shapes).values(), **offer.options)
        kind, rate = kind_of(optimizer), float(optimizer.defaults.get("lr") or 0.1)
        size = 2.0 ** math.floor(math.log2(min(0.5, 8 * rate)))
        return cls(
            offer=offer,
            needs=kind.needs,
            reason=kind.reason,
            needs_closure=kind.needs_closure,
            shapes=shapes,
            size=size,
        )

    def make(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """Return a new optimizer; one that needs whole tensors steps them whole."""
        params, options = list(params), {**self.offer.options, **options}
        found = self.offer.find()
        if self.needs in ("tensors", "all tensors") and is_initialized():
            return whole(found, params, together=self.needs == "all tensors", **options)
        made: torch.optim.Optimizer = found(params, **options)
        return made


class OptimizerTraining:
    """Steps of an optimizer whose gradients are known, on parts of parameters if a run has started
    and ``is_sharded``, and on whole ones otherwise.

    The loss is linear in the parameters. So the gradients of a step are the same numbers whatever
    the parameters are, and the mean over any number of ranks.
    """

    def __init__(
        self,
        subject: OptimizerSubject,
        *,
        shapes: Shapes | None = None,
        dtype: torch.dtype = torch.float64,
        is_sharded: bool = True,
        has_few_bits: bool = False,
        **settings: Any,
    ) -> None:
        self.subject, self.dtype = subject, dtype
        self.has_few_bits = has_few_bits
        self.shapes = subject.shapes if shapes is None else shapes
        values = first_values(self.shapes, dtype, subject.size if has_few_bits else 0.5)
        self.is_sharded = is_sharded and is_initialized()
        self.params: dict[str, Any] = {
            name: DistributedParameter(value) if self.is_sharded else torch.nn.Parameter(value)
            for name, value in values.items()
        }
        self.optimizer = subject.make(self.params.values())
        self.manager = OptimManager(**settings) if self.is_sharded else None
        if self.manager is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of half parameters without masters
                self.manager.add_optimizer(self.optimizer)

    def run(self, steps: Iterable[int], **options: Any) -> Values:
        """Take ``steps``, and return the whole parameters."""
        for step in steps:
            self.step(step, **options)
        return self.values()

    def step(self, step: int, *, micro_batches: int = 1, max_norm: float | None = None) -> None:
        """Take a step."""
        self.backward(step, micro_batches=micro_batches)
        if max_norm is not None:
            assert self.manager is not None
            self.manager.clip_grad_norm(self.params.values(), max_norm)
        self.update()

    def backward(self, step: int, *, micro_batches: int = 1, factor: float = 1.0) -> None:
        """Give the parameters their gradients of ``step``, times ``factor``, in several
        backward passes.
        """
        self.optimizer.zero_grad()
        gradients = self.gradients(step)
        for micro in range(micro_batches):
            share = 2 * (micro + 1) / (micro_batches * (micro_batches + 1))  # their sum is 1
            loss = self.loss(gradients, factor * share)
            if self.manager is None:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                self.manager.backward(loss)

    def loss(self, gradients: Values, factor: float) -> torch.Tensor:
        """Return this rank's loss: that of one process, and something that the mean over the
        ranks cancels.
        """
        terms = []
        for name, param in self.params.items():
            gradient = gradients[name] * factor
            if self.is_sharded:
                ranks, own = current().world_size, current().rank
                gradient = gradient * (1 + (own - (ranks - 1) / 2) / 4)
            if param.requires_grad:
                terms.append(((param.gather() if self.is_sharded else param) * gradient).sum())
        return torch.stack(terms).sum()

    def update(self) -> None:
        """Step with the gradients that there are."""
        (self.optimizer if self.manager is None else self.manager).step()

    def gradients(self, step: int) -> Values:
        """Return the whole gradients of ``step``.

        Their sizes differ from step to step, as what an optimizer remembers shows then. With
        ``has_few_bits`` sums and means are exact in every type, and an element's sign stays, so
        that no rounding decides on a sign.
        """
        scale = (1.0, 0.25, 4.0, 0.5, 2.0)[step % 5]
        made = {}
        for number, (name, shape) in enumerate(self.shapes.items()):
            generator = torch.Generator().manual_seed(1000 * step + number)
            if not self.has_few_bits:
                made[name] = torch.randn(shape, generator=generator, dtype=self.dtype) * scale
            else:
                sizes = torch.randint(4, 9, shape, generator=generator) / 8
                of_element = torch.Generator().manual_seed(number)
                signs = torch.randint(2, shape, generator=of_element) * 2 - 1
                made[name] = (sizes * signs * scale).to(self.dtype)
        return made

    def values(self) -> Values:
        """Return copies of the whole parameters. Collective if they are sharded."""
        return {
            name: (param.gather_all() if self.is_sharded else param).detach().clone()
            for name, param in self.params.items()
        }

    def set_values(self, values: Values) -> None:
        """Write whole values into the parameters."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(param.local_part(values[name]) if self.is_sharded else values[name])


def first_values(
    shapes: Shapes, dtype: torch.dtype = torch.float32, size: float = 0.5
) -> dict[str, Any]:
    """Return parameters of ``shapes`` with values between half of ``size`` and ``size``, either
    sign, which every type can represent.
    """
    values = {}
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(100 + number)
        eighths = torch.randint(4, 9, shape, generator=generator) / 8
        signs = torch.randint(2, shape, generator=generator) * 2 - 1
        values[name] = torch.nn.Parameter((eighths * signs * size).to(dtype), requires_grad=True)
    return values


def assert_close(
    found: Values, expected: Values, *, start: Values, tolerance: float = SAME
) -> None:
    """Fail unless ``found`` is what is ``expected``, within ``tolerance`` of the way from
    ``start``.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        way = (value.double() - start[name].detach().double()).abs().max()
        torch.testing.assert_close(
            found[name].double(),
            value.double(),
            rtol=0.0,
            atol=float(tolerance * way),
            msg=named(name),
        )


def named(name: str) -> Callable[[str], str]:
    """Return the message of a comparison of the tensor ``name``."""
    return lambda text: f"{name}: {text}"


def assert_equal(found: Values, expected: Values) -> None:
    """Fail unless ``found`` is what is ``expected``, in every bit."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
