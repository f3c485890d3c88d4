"""The experiments that ship with the package, by name."""

import importlib.resources
from importlib.resources.abc import Traversable

from flwr_ppsgd.checks import nearest

SUFFIX = ".toml"
SHIPPED = importlib.resources.files("flwr_ppsgd.lab.experiments") / "presets"


def presets() -> dict[str, str]:
    """Name → what it is, which is the first line of its file."""
    found = {}
    for file in sorted(SHIPPED.iterdir(), key=lambda file: file.name):
        if file.name.endswith(SUFFIX):
            first, *_ = file.read_text(encoding="utf-8").splitlines()
            found[file.name.removesuffix(SUFFIX)] = first.removeprefix("# ")
    return found


def preset(name: str) -> Traversable:
    """The file of an experiment that ships; ValueError with the nearest name if there is none."""
    known = presets()
    if name not in known:
        raise ValueError(
            f"{name}: there is no such file and no experiment of that name: did you mean "
            f"{nearest(name, known)!r}? `ppsgd experiments` lists them"
        )
    return SHIPPED / f"{name}{SUFFIX}"
