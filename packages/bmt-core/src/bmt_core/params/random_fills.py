"""Random fills of a part of a parameter, such as ``torch.nn.init.normal_(p)`` and
``p.data.uniform_()``, raise.

All ranks draw the same numbers, so all parts of a tensor would get equal values. And many rules of
initialisation need sizes of the whole tensor, which a part does not have. Random values that were
drawn elsewhere and copied cannot be detected.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from bmt_core.errors import ConfigError

INITIALISE_INSTEAD = (
    "Initialise the model before it is wrapped, or let init_parameters(model) draw whole tensors:"
    " by the init_method of a DistributedParameter or, for a model made on the meta device, by"
    " init=..., which is called with each module."
)


class NoRandomFills:
    """Overrides the methods that fill a tensor with random numbers: they raise if the tensor is one
    part of several.
    """

    __slots__ = ()

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other elements, or other layers of the model."""
        raise NotImplementedError

    def bernoulli_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("bernoulli_", args, kwargs)

    def cauchy_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("cauchy_", args, kwargs)

    def exponential_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("exponential_", args, kwargs)

    def geometric_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("geometric_", args, kwargs)

    def log_normal_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("log_normal_", args, kwargs)

    def normal_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("normal_", args, kwargs)

    def random_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("random_", args, kwargs)

    def uniform_(self, *args: Any, **kwargs: Any) -> Any:
        return self._fill("uniform_", args, kwargs)

    def _fill(self, name: str, args: Any, kwargs: Any) -> Any:
        if self.is_part:
            _refuse(name)
        return getattr(torch.Tensor, name)(self, *args, **kwargs)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"{name}() would fill a part of a sharded parameter, and every rank would draw the same"
        f" numbers for its part. {INITIALISE_INSTEAD} If each rank should draw for itself, call"
        f" p.detach().{name}()."
    )
