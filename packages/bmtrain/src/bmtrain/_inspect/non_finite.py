"""``NonFiniteSearch``: hooks on the modules of a model that note where the first value that is not
finite appears.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import BmtError
from bmt_core.run import runtime
from bmt_params.nested import tensors_in
from bmt_params.parameter import reduce_held_back

PARAMETER, FORWARD, BACKWARD = range(3)
_MOST_NAMES = 5


class NonFiniteError(BmtError):
    """A value, or a gradient, is infinite or not a number; the message says where it appeared."""


class Finding(NamedTuple):
    """What was not finite: ``moment`` is one of the three above, in the order of a step."""

    moment: int
    text: str


class NonFiniteSearch:
    """The context manager of :func:`bmtrain.debug.find_non_finite`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._found: dict[int, Finding] = {}
        self._handles: list[RemovableHandle] = []
        # By the id of a tensor, which it keeps alive: the modules that have made and taken it.
        self._uses: dict[int, tuple[torch.Tensor, list[str], list[str]]] = {}

    def __enter__(self) -> Self:
        bad = [name for name, p in self._model.named_parameters() if _is_bad(p)]
        if bad:
            self._note(PARAMETER, f"before the step, {_listed(bad)} {_are(bad)} not finite")
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._uses.clear()
        if error is not None:
            # The other ranks may not come here, so nothing is exchanged with them.
            for found in sorted(self._found.values()):
                error.add_note(f"find_non_finite: on this rank {found.text}.")
            return
        reduce_held_back(self._model.parameters())
        grads = {name: p.grad for name, p in self._model.named_parameters()}
        bad = [name for name, grad in grads.items() if grad is not None and _is_bad(grad)]
        own = sorted(self._found.values()), bad
        ranks = [own]
        if runtime.is_initialized():
            ranks = all_gather_object(own, runtime.current().world)
        findings = [found for found, _ in ranks]
        # A rank has the gradients of its parts, so which rank has one says nothing.
        names = list(dict.fromkeys(name for _, bad in ranks for name in bad))
        if any(findings) or names:
            raise NonFiniteError(_message(findings, names))

    def _note(self, moment: int, text: str) -> None:
        self._found.setdefault(moment, Finding(moment, text))

    def _name(self, module: nn.Module) -> str:
        name = self._names[module]
        return (
            f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        )

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for tensor in tensors_in((args, kwargs)):
            self._watch_gradient(tensor, taken_by=self._name(module))
            if FORWARD not in self._found and _is_bad(tensor) and not _is_mask(tensor):
                self._note(
                    FORWARD, f"in forward, an input of {self._name(module)} {_numbers(tensor)}"
                )

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for tensor in tensors_in(outputs):
            self._watch_gradient(tensor, made_by=self._name(module))
            if FORWARD not in self._found and _is_bad(tensor):
                bad = [
                    name for name, p in module._parameters.items() if p is not None and _is_bad(p)
                ]
                why = "its inputs and parameters are finite"
                if bad:
                    why = f"its {_listed(bad)} {_are(bad)} not finite"
                output = f"in forward, the output of {self._name(module)}"
                self._note(FORWARD, f"{output} {_numbers(tensor)}; {why}")

    def _watch_gradient(
        self, tensor: torch.Tensor, *, made_by: str = "", taken_by: str = ""
    ) -> None:
        if not tensor.requires_grad or BACKWARD in self._found:
            return
        is_known = id(tensor) in self._uses
        _, makers, takers = self._uses.setdefault(id(tensor), (tensor, [], []))
        makers += [made_by] if made_by else []
        takers += [taken_by] if taken_by else []
        if not is_known:
            tensor.register_hook(lambda grad: self._see_gradient(grad, makers, takers))  # type: ignore[no-untyped-call]

    def _see_gradient(self, grad: torch.Tensor, makers: list[str], takers: list[str]) -> None:
        if BACKWARD not in self._found and _is_bad(grad):
            of = f"the output of {makers[0]}" if makers else f"an input of {takers[0]}"
            then = f", which {takers[-1]} takes," if makers and takers else ""
            self._note(BACKWARD, f"in backward, the gradient of {of}{then} {_numbers(grad)}")


def _message(findings: Sequence[Sequence[Finding]], gradients: Sequence[str]) -> str:
    """Return what ranks have found at the earliest moment of the step, equal texts once, and whose
    ``gradients`` are not finite.
    """
    first = min((found.moment for own in findings for found in own), default=None)
    ranks_of: dict[str, list[int]] = {}
    for rank, own in enumerate(findings):
        for found in own:
            if found.moment == first:
                ranks_of.setdefault(found.text, []).append(rank)
    lines = ["A value of the step is not finite."]
    for text, ranks in ranks_of.items():
        lines.append(f"{text[0].upper()}{text[1:]} (rank {', '.join(map(str, ranks))}).")
    if gradients:
        lines.append(f"After backward, the gradient of {_listed(gradients)} is not finite.")
    return "\n".join(lines)


def _is_bad(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    with torch.no_grad():
        return not bool(torch.isfinite(tensor.detach()).all())


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, an input that is not finite, has no gradient and is -inf in places, as a
    mask of attention is.
    """
    found = tensor.detach()
    return not (
        tensor.requires_grad or tensor.is_complex() or found.isnan().any() or found.isposinf().any()
    )


def _numbers(tensor: torch.Tensor) -> str:
    with torch.no_grad():
        bad = int((~torch.isfinite(tensor.detach())).sum())
    return (
        f"of shape {tuple(tensor.shape)} has {bad} of {tensor.numel()} elements that are not finite"
    )


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MOST_NAMES])
    if len(names) > len(shown):
        shown[-1:] = [f"{len(names) - len(shown) + 1} others"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _are(names: Iterable[str]) -> str:
    return "is" if len(list(names)) == 1 else "are"
