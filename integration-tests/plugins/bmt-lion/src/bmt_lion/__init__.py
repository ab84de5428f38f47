"""The Lion optimizer, also known to bmt as ``"lion"``."""

from bmt_lion.lion import Lion

__all__ = ["Lion"]
