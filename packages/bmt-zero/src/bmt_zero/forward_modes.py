"""Random numbers, autocast and default device of a forward, for computing it again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch


class RandomNumbers:
    """The generators' states before forward; kept only if forward drew random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._states = [generator.get_state() for generator in self._generators]

    def forget_unless_drawn(self) -> None:
        """Forget the states if nothing was drawn since."""
        pairs = zip(self._generators, self._states, strict=True)
        if all(torch.equal(generator.get_state(), state) for generator, state in pairs):
            self._generators, self._states = [], []

    def present(self) -> list[torch.Tensor]:
        """Return the generators' present states."""
        return [generator.get_state() for generator in self._generators]

    def skip_to(self, states: Sequence[torch.Tensor]) -> None:
        """Set the generators to states that forward has had. Nothing if forward drew nothing."""
        if self._states:
            _set_states(self._generators, states)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Inside, the generators draw what they drew in forward."""
        present = [generator.get_state() for generator in self._generators]
        _set_states(self._generators, self._states)
        try:
            yield
        finally:
            _set_states(self._generators, present)


class Modes:
    """Autocast and the default device of forward, to be restored for the recomputation."""

    def __init__(self, device: torch.device) -> None:
        self._types = dict.fromkeys(("cpu", device.type))
        self._autocast = self._present_autocast()
        self._device = torch.get_default_device()

    def restored(self) -> AbstractContextManager[object]:
        """Inside, autocast and the default device are those of forward.

        Autocast keeps no casts. Those that it kept of a weight in an earlier step of the same
        autocast region are old; in forward it keeps none of a Block's weights, which are not
        leaves of the graph there.
        """
        is_other_device = self._device != torch.get_default_device()
        is_other_autocast = self._autocast != self._present_autocast()
        casts = True in [enabled for _, _, enabled in self._autocast]  # one call less than any()
        if not (is_other_device or is_other_autocast or casts):
            return nullcontext()
        stack = ExitStack()
        if is_other_device:
            stack.enter_context(self._device)
        for kind, dtype, enabled in self._autocast:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
            )
        return stack

    def _present_autocast(self) -> list[tuple[str, torch.dtype, bool]]:
        return [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in self._types
        ]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
