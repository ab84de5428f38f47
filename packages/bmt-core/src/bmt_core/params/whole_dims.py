"""``p.ndim`` and ``p.dim()`` of a part of a parameter are those of the whole parameter.

Programs and libraries decide by them which parameters decay, get another learning rate or are
initialised, and a part has one dimension, whatever the parameter has. ``p.shape`` is the part's:
code that decides by ``len(p.shape)`` is refused where that is certain, see
:mod:`bmt_core.params.ndim_groups`.
"""

from __future__ import annotations


class WholeDims:
    """Overrides ``ndim`` and ``dim()``."""

    __slots__ = ()

    @property
    def whole_dims(self) -> int:
        """The number of dimensions of the whole parameter."""
        raise NotImplementedError

    def dim(self) -> int:
        """Return the number of dimensions of the whole parameter; ``shape`` is the part's."""
        return self.whole_dims

    ndim: int = property(dim)  # type: ignore[assignment]  # an attribute to torch's stubs
