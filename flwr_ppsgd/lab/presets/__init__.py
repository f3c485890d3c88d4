"""The experiments that ship with the package. Light: `ppsgd experiments` answers at once."""

import importlib.resources

PRESETS = importlib.resources.files("flwr_ppsgd.lab.presets")
SUFFIX = ".toml"


def presets() -> dict[str, str]:
    """Name → what it is and how long it takes: the first two lines of its file."""
    found = {}
    for file in sorted(PRESETS.iterdir(), key=lambda file: file.name):
        if file.name.endswith(SUFFIX):
            what, takes, *_ = file.read_text(encoding="utf-8").splitlines()
            name = file.name.removesuffix(SUFFIX)
            found[name] = f"{what.removeprefix('# ')} {takes.removeprefix('# ')}"
    return found
