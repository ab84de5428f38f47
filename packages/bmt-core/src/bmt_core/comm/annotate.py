"""``annotate``: what calls are made for, as errors and traces of torch's profiler show it; and
:data:`PLACES`, where in the model this rank computes.
"""

from __future__ import annotations

import threading

from bmt_core.torch_internals import named_in_trace


class _Annotation(threading.local):
    """Of this thread's next call: what follows its name in messages, and what of that is compared
    between ranks.
    """

    texts = "", ""


class _Places:
    """Where in the model this rank computes: all calls are made at :attr:`now`, as messages say it,
    "in the forward of layers.3". Other threads read it.
    """

    now = ""


ANNOTATION, PLACES = _Annotation(), _Places()


class annotate:  # a context manager that is read like a function
    """Inside, errors about collectives name what they are for: ``text``, such as "for layers.0".

    The text is compared between ranks; pass ``is_compared=False`` if it may differ. ``label`` names
    the work inside in traces of torch's profiler.
    """

    def __init__(self, text: str, *, is_compared: bool = True, label: str = "") -> None:
        shown = f", {text}" if text else ""
        self._texts = shown, shown if is_compared else ""
        self._in_trace = named_in_trace(label) if label else None

    def __enter__(self) -> None:
        self._before, ANNOTATION.texts = ANNOTATION.texts, self._texts
        if self._in_trace is not None:
            self._in_trace.__enter__()

    def __exit__(self, *exception: object) -> None:
        ANNOTATION.texts = self._before
        if self._in_trace is not None:
            self._in_trace.__exit__(None, None, None)
