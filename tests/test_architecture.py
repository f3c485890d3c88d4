"""The shape of the package: import arrows, what is exported, what an import loads."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import flwr_ppsgd
import flwr_ppsgd.legacy
from tests.support.loaded import loaded_by

PACKAGE = Path(flwr_ppsgd.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules of this package that a file names in an import, anywhere in it, as ``lab.run``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    own = (name for name in found if name.startswith("flwr_ppsgd."))
    return frozenset(name.removeprefix("flwr_ppsgd.") for name in own)


def test_the_arrows_between_the_rooms() -> None:
    """Only the command line knows the laboratory; server and client know nothing of each other."""
    for path in MODULES:
        room = name_of(path).partition(".")[0]
        used = {name.partition(".")[0] for name in imports(path)}
        assert room in ("lab", "cli") or "lab" not in used, path
        assert room != "client" or "server" not in used, path
        assert room != "server" or "client" not in used, path


FLOWER_INTERNALS = {"simulation", "server.superlink", "client.check_node"}


def outside(path: Path) -> set[str]:
    """The modules from which a file imports names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_flowers_internals_stand_in_three_files() -> None:
    for path in MODULES:
        private = [
            name for name in outside(path) if name.startswith(("flwr.supercore", "flwr.proto"))
        ]
        assert not private or name_of(path) in FLOWER_INTERNALS, (path, private)


@pytest.mark.parametrize("door", [flwr_ppsgd, flwr_ppsgd.legacy])
def test_all_is_exactly_what_a_door_exports(door: object) -> None:
    names = list(vars(door)["__all__"])
    assert sorted(dir(door)) == sorted(set(names))
    for name in names:
        assert getattr(door, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        door.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_doors_names_for_type_checkers_are_those_that_are_loaded() -> None:
    """The imports under TYPE_CHECKING and the table of homes say the same."""
    for door in (flwr_ppsgd, flwr_ppsgd.legacy):
        tree = ast.parse(Path(str(door.__file__)).read_text(encoding="utf-8"))
        guarded = [node for node in tree.body if isinstance(node, ast.If)]
        shown = {
            alias.name: node.module
            for block in guarded
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert shown == door._HOMES
        assert set(shown) == set(door.__all__)


HEAVY = {"dp_accounting", "scipy", "matplotlib", "torch", "ray", "pyarrow", "flwr.superlink"}
SERVER = {"flwr_ppsgd.server", "flwr_ppsgd.ledger", "flwr_ppsgd.epsilon"}
CLIENTS = """
from flwr_ppsgd import client_app
client_app(print)
from flwr_ppsgd.legacy import PPSGDClient
from flwr_ppsgd import AdditiveLinear, Learner, Minibatches, PersonalModel, personalize
import flwr_ppsgd.lab.client_app
import simulations.client_app
import simulations.deployment.client_app
"""
TORCH_CLIENTS = """
from flwr_ppsgd import torch_client, torch_learner, shared_arrays
import simulations.apps.text.client_app
import simulations.apps.adapters.client_app
"""


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_by("import flwr_ppsgd, flwr_ppsgd.legacy, flwr_ppsgd.simulation")
    assert not loaded & (HEAVY | SERVER)


def test_a_client_loads_neither_the_server_nor_accounting() -> None:
    assert not loaded_by(CLIENTS) & (HEAVY | SERVER)
    loaded = loaded_by(TORCH_CLIENTS)
    assert "torch" in loaded
    assert not loaded & (SERVER | {"dp_accounting", "flwr.superlink"})


def test_a_server_does_not_load_what_it_may_not_need() -> None:
    loaded = loaded_by("from flwr_ppsgd import PPSGD\nfrom flwr_ppsgd.legacy import PPSGDStrategy")
    assert not loaded & {"torch", "ray", "matplotlib", "flwr.superlink", "flwr_ppsgd.client"}


def test_minibatches_take_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    batches = flwr_ppsgd.Minibatches(x, torch.tensor([3.0, 4.0]), 2, seed=0, user=0)
    assert [sorted(part) for part in batches(1)] == [[1, 2], [3, 4]]


def test_a_name_whose_extra_is_missing_raises_the_pip_command() -> None:
    code = "import sys\nsys.modules['torch'] = None\nimport flwr_ppsgd\nflwr_ppsgd.SplitModel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: SplitModel needs torch"), last
    assert last.endswith("pip install 'flwr-ppsgd[torch]'")


def test_the_core_knows_neither_flower_nor_torch() -> None:
    values = ("algorithm", "noise", "epsilon", "ledger", "statement")
    core = [PACKAGE / f"{name}.py" for name in values]
    for path in [*core, *(PACKAGE / "secure").glob("*.py")]:
        roots = {name.split(".")[0] for name in outside(path)}
        assert not roots & {"flwr", "torch", "ray"}
