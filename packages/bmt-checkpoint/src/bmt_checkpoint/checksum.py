"""The CRC-32 of a tensor whose parts are on several ranks, combined from the CRC-32 of each part.

A CRC-32 is a remainder of polynomials over the field of two elements. The CRC-32 of the whole is
the exclusive or of those of its parts, each extended by as many zero bytes as follow the part
(Adler's ``crc32_combine`` in zlib, which Python does not offer).
"""

from __future__ import annotations

from functools import lru_cache

# Without the term of power 32; in reversed bit order: the highest bit is the lowest power.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def followed_by(checksum: int, count: int) -> int:
    """Return the contribution of a part with this ``checksum`` to the whole, in which ``count``
    bytes follow the part.

    The checksum of the whole is the exclusive or of the contributions of all parts.

    >>> import zlib
    >>> followed_by(zlib.crc32(b"check"), 3) ^ zlib.crc32(b"sum") == zlib.crc32(b"checksum")
    True
    """
    return _product(_shift(count), checksum) if count else checksum


@lru_cache(maxsize=1024)
def _shift(count: int) -> int:
    """Return the remainder of x to the power of the bits in ``count`` bytes."""
    power, square, exponent = _ONE, _ONE >> 1, 8 * count
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square, exponent = _product(square, square), exponent >> 1
    return power


def _product(one: int, other: int) -> int:
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
