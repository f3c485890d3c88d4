"""Names that are loaded when they are first used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose names live in other modules.

    Args:
        package: the package's ``__name__``.
        homes: the full name of the module that defines each public name.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(_module(name, homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(homes)

    return load, names


def _module(name: str, home: str) -> Any:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        command = "pip install 'flwr-ppsgd[torch]'"
        raise ImportError(f"{name} needs torch, which is not installed: {command}") from None
