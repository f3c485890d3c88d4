"""The experiments that ship with the package. Light: `ppsgd experiments` answers at once."""

import importlib.resources

PRESETS = importlib.resources.files("flwr_ppsgd.lab.presets")
SUFFIX = ".toml"


def presets() -> dict[str, str]:
    """Name → what it is, which is the first line of its file."""
    found = {}
    for file in sorted(PRESETS.iterdir(), key=lambda file: file.name):
        if file.name.endswith(SUFFIX):
            first, *_ = file.read_text(encoding="utf-8").splitlines()
            found[file.name.removesuffix(SUFFIX)] = first.removeprefix("# ")
    return found
