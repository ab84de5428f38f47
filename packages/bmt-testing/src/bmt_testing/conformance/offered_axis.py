"""``OfferedAxis``: the axis under test, in any size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from bmt_core.settings import MeshAxis, RunSettings
from bmt_testing.conformance.offer import Offer, load_registry
from bmt_testing.matches_single import assert_matches_single
from bmt_testing.settings import TrainingSettings, arguments_of_axes


@dataclass(frozen=True)
class OfferedAxis:
    """The axis ``offer.name`` of the plugins of ``offer``."""

    offer: Offer

    @property
    def name(self) -> str:
        """The axis's name."""
        return self.offer.name

    def of_size(self, size: int) -> MeshAxis:
        """Return the axis of a run that asks for ``size``."""
        found = self._found(RunSettings(**arguments_of_axes({self.name: size})))
        assert found is not None, f"a run that asks for {self.name} of size {size} has no such axis"
        return found

    def by_default(self) -> MeshAxis | None:
        """Return the axis of a run that asks for nothing, if there is one."""
        return self._found(RunSettings())

    def run_settings(self, size: int) -> dict[str, Any]:
        """Return the arguments of ``init_distributed`` for ``size`` ranks along the axis."""
        return self.offer.run_settings(**arguments_of_axes({self.name: size}), timeout=60.0)

    def compare_training(
        self,
        model_fn: Callable[[], nn.Module],
        batch_fn: Callable[[int], Any],
        parallelize: Callable[[nn.Module], nn.Module],
        settings: TrainingSettings,
    ) -> None:
        """Compare a training by ``settings`` and with two ranks along the axis with plain torch."""
        plugins = [importlib.import_module(module) for module in self.offer.plugins]
        assert_matches_single(
            model_fn,
            batch_fn,
            steps=2,
            settings=replace(settings, axes={self.name: 2}),
            parallelize=parallelize,
            # The ranks along this axis, and no others, have layers of their own.
            pipeline="layers" if self.name == "pp" else None,
            init={"plugins": plugins},
        )

    def _found(self, settings: RunSettings) -> MeshAxis | None:
        axes = load_registry(self.offer.plugins).mesh_axes(settings)
        return next((axis for axis in axes if axis.name == self.name), None)
