"""How the deliberately wrong plugins of a kit are named and collected."""

import re
from typing import Any, ClassVar


class Named:
    """A plugin with the name of its class. Each class below it that says what it ``breaks`` is one
    of ``plugins``.
    """

    name: ClassVar[str]
    breaks: ClassVar[str]
    plugins: ClassVar[list[Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if Named in cls.__bases__:
            cls.plugins = []
        if "breaks" in vars(cls):
            cls.plugins.append(cls)
