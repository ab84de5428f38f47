"""Comparisons of what kernels compute with what they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assert_refused(case: str, function: Any, *arguments: Any, **options: Any) -> None:
    """Fail unless the call raises an error that says something."""
    try:
        function(*arguments, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        assert str(error), f"{case}: the error has no text"
    else:
        raise AssertionError(f"{case}: there is no error")


def assert_close(
    found: list[torch.Tensor], expected: list[torch.Tensor], title: str = "", least: float = 5e-7
) -> None:
    """Fail unless the results are those of a formula, but for rounding."""
    # Some roundings of float32 (2**-24 relative) on values of order 1, some of which cancel.
    for own, exact in zip(found, expected, strict=True):
        factor = 1e-6 if own.dtype == torch.float64 else 1.0
        torch.testing.assert_close(
            own.double(), exact, rtol=1e-6 * factor, atol=least * factor, msg=_after(title)
        )


def assert_near(
    found: torch.Tensor | None,
    expected: torch.Tensor,
    title: str,
    *,
    dtype: torch.dtype = torch.float32,
    least: float = 2e-6,
) -> None:
    """Fail unless a loss or its gradient is that of its definition, but for rounding."""
    # Float32 arithmetic on numbers up to about 20, and one rounding to ``dtype``, which may be
    # denormal there.
    info = torch.finfo(dtype)
    assert found is not None, title
    torch.testing.assert_close(
        found.double(),
        expected.double(),
        rtol=max(4e-6, info.eps / 2),
        atol=max(least, info.smallest_normal * info.eps),
        msg=_after(title),
    )


def assert_equal(found: Any, expected: Any, title: str = "") -> None:
    """Fail unless the tensors are equal in every bit, but any NaN is as good as another."""
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(
            own, exact, rtol=0.0, atol=0.0, equal_nan=True, msg=_after(title)
        )
        if own.is_floating_point():
            has_sign = own.signbit() == exact.signbit()
            assert bool((has_sign | own.isnan()).all()), f"{title}: a zero has the other sign"


def assert_same_results(
    found: list[torch.Tensor], expected: list[torch.Tensor], title: str
) -> None:
    """Fail unless the results are those of another layout, but for rounding."""
    for own, other in zip(found, expected, strict=True):
        eps = torch.finfo(own.dtype).eps if own.is_floating_point() or own.is_complex() else 0.0
        torch.testing.assert_close(
            own, other, rtol=max(2 * eps, 1e-6) if eps else 0.0, atol=8 * eps, msg=_after(title)
        )


def _after(title: str) -> Callable[[str], str] | None:
    return (lambda text: f"{title}: {text}") if title else None
