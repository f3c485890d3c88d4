"""The shape of the package: import arrows, what is exported, what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flwr_ppsgd

PACKAGE = Path(flwr_ppsgd.__file__).parent
ORDER = [
    "algorithm", "noise", "privacy", "theory", "disk", "server.tensorboard", "server.checkpoint", "server.journal",
    "server.curator", "promise", "settings", "plan", "wire", "client.shelf", "client.sent", "client.personal",
    "server.enrolment", "server.rounds", "server.message_api", "client.message_api", "server.legacy_api",
    "models.split", "models.cnn", "data.synthetic", "models.torch_app", "data", "simulation", "experiments",
    "client.model", "audit", "results.plots", "results.figures", "results.page", "experiments.app", "cli",
]  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return place(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def place(module: str) -> str:
    """The entry of ``ORDER`` that a module falls under: its own, or that of its folder."""
    return module if module in ORDER else module.partition(".")[0]


def imports(path: Path) -> set[str]:
    """Names below ``flwr_ppsgd`` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "flwr_ppsgd":
            names = [f"flwr_ppsgd.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}".removeprefix("flwr_ppsgd.") in ORDER
            ]
            names = names or [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {place(name.removeprefix("flwr_ppsgd.")) for name in names if name.startswith("flwr_ppsgd.")}
    return found


@pytest.mark.parametrize("path", [p for p in MODULES if module_of(p) in ORDER], ids=lambda p: p.stem)
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    own = module_of(path)
    for name in imports(path) - {own}:
        assert ORDER.index(name) < ORDER.index(own), f"{own} must not import {name}"


def test_every_module_has_its_place() -> None:
    assert {module_of(path) for path in MODULES} - {"__init__", "client", "models", "results", "server"} <= set(ORDER)


def test_all_is_exactly_what_is_exported() -> None:
    submodules = {path.stem if path.stem != "__init__" else path.parent.name for path in MODULES}
    public = {name for name in vars(flwr_ppsgd) if not name.startswith("_")} - submodules
    assert public == set(flwr_ppsgd.__all__)


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    code = "import sys, flwr_ppsgd; print(sorted({'torch', 'ray', 'matplotlib', 'pandas'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_core_knows_neither_flower_nor_torch() -> None:
    for name in ("algorithm", "noise", "privacy"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
        roots = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        assert not roots & {"flwr", "torch", "ray"}
