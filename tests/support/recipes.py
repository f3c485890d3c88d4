"""Stock-shaped apps as packages of their own, before and after the page's diffs."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

STOCK = ROOT / "tests" / "support" / "stock"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "flower-apps.md").read_text(encoding="utf-8")
FILES = ("message/client_app", "message/server_app", "legacy/client_app", "legacy/server_app")
BLOCKS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
DIFFS = dict(zip(FILES, BLOCKS, strict=True))
PACKAGE = "pytorchexample"  # the name of the package in Flower's quickstart and in the diffs
CONFIG: dict[str, Any] = {
    "num-server-rounds": 2,
    "fraction-evaluate": 0.5,
    "local-epochs": 1,
    "learning-rate": 0.1,
    "batch-size": 10,
    "final-model": "final_model.pt",
}
PROJECT = """[project]
name = "stock-app"
version = "1.0.0"
description = "An app in the shape of a quickstart"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "stock"

[tool.flwr.app.components]
serverapp = "pytorchexample.server_app:app"
clientapp = "pytorchexample.client_app:app"

[tool.flwr.app.config]
"""


def write_app(kind: str, directory: Path) -> Path:
    """A stock app, "message" or "legacy", as ``flwr run`` takes it."""
    package = directory / PACKAGE
    package.mkdir(parents=True)
    for path in (STOCK / kind / "client_app.py", STOCK / kind / "server_app.py", STOCK / "task.py"):
        text = path.read_text(encoding="utf-8").replace("tests.support.stock", PACKAGE)
        (package / path.name).write_text(text, encoding="utf-8")
    (package / "__init__.py").touch()
    lines = [f"{key} = {value!r}\n" for key, value in CONFIG.items()]
    (directory / "pyproject.toml").write_text(PROJECT + "".join(lines), encoding="utf-8")
    return directory


def apply_page(kind: str, directory: Path) -> None:
    """The page's two diffs for this kind of app, exactly as printed."""
    for file in FILES:
        if file.startswith(kind):
            patch = shutil.which("patch")
            assert patch, "the tests of recipes need the program patch"
            subprocess.run(
                [patch, "-p0", "--fuzz=0", "--no-backup-if-mismatch"],
                input=DIFFS[file],
                text=True,
                cwd=directory,
                check=True,
                capture_output=True,
            )


def python_block(heading: str) -> str:
    """The code under a heading of the page."""
    _, _, rest = PAGE.partition(f"\n## {heading}\n")
    section, _, _ = rest.partition("\n## ")
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(block)


def imported(directory: Path, module: str) -> Any:
    """A module of the app in ``directory``, whichever app was imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    importlib.invalidate_caches()
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(f"{PACKAGE}.{module}")
    finally:
        sys.path.remove(str(directory))


def change(directory: Path, file: str, before: str, after: str) -> None:
    """One line of an app replaced by another."""
    path = directory / PACKAGE / f"{file}.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [place for place, line in enumerate(lines) if line.strip().startswith(before)]
    assert len(found) == 1, (before, found)
    indent = lines[found[0]][: len(lines[found[0]]) - len(lines[found[0]].lstrip())]
    lines[found[0]] = indent + after
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
