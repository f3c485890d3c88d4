"""The shape of the package: import arrows, what is exported, what an import loads."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import flwr_ppsgd
import flwr_ppsgd.legacy
from tests.support.paths import ROOT

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


def test_the_plugin_never_imports_the_laboratory() -> None:
    """Only the command line does, when a command asks for it."""
    for path in MODULES:
        own = name_of(path).partition(".")[0]
        used = {name.partition(".")[0] for name in imports(path)}
        assert own in ("lab", "cli") or "lab" not in used, path


def test_server_and_client_never_import_each_other() -> None:
    for path in MODULES:
        own = name_of(path).partition(".")[0]
        others = {name.partition(".")[0] for name in imports(path)}
        assert not (own == "client" and "server" in others), path
        assert not (own == "server" and "client" in others), path


FLOWER_INTERNALS = {"simulation", "server.superlink", "client.check_node"}


def test_flowers_internals_stand_in_three_files() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules = {str(node.module) for node in froms}
        private = [name for name in modules if name.startswith(("flwr.supercore", "flwr.proto"))]
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


def loaded_by(code: str) -> set[str]:
    """Which modules a fresh process has loaded after running ``code``."""
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


HEAVY = {"dp_accounting", "scipy", "matplotlib", "torch", "ray", "pyarrow", "flwr.superlink"}
SERVER = {"flwr_ppsgd.server", "flwr_ppsgd.ledger", "flwr_ppsgd.epsilon"}
CLIENTS = [
    "from flwr_ppsgd import client_app; client_app(print)",
    "from flwr_ppsgd.legacy import PPSGDClient",
    "from flwr_ppsgd import AdditiveLinear, Learner, Minibatches, PersonalModel, personalize",
    "import flwr_ppsgd.lab.client_app",
    "import simulations.client_app",
    "import simulations.deployment.client_app",
]
TORCH_CLIENTS = [
    "from flwr_ppsgd import torch_client, torch_learner, shared_arrays",
    "import simulations.apps.text.client_app",
    "import simulations.apps.adapters.client_app",
]


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_by("import flwr_ppsgd, flwr_ppsgd.legacy, flwr_ppsgd.simulation")
    assert not loaded & (HEAVY | SERVER)


@pytest.mark.parametrize("code", CLIENTS)
def test_a_client_loads_neither_the_server_nor_accounting_nor_torch(code: str) -> None:
    assert not loaded_by(code) & (HEAVY | SERVER)


@pytest.mark.parametrize("code", TORCH_CLIENTS)
def test_a_torch_client_loads_neither_the_server_nor_accounting(code: str) -> None:
    loaded = loaded_by(code)
    assert "torch" in loaded
    assert not loaded & (SERVER | {"dp_accounting", "flwr.superlink"})


def test_a_server_does_not_load_what_it_may_not_need() -> None:
    loaded = loaded_by("from flwr_ppsgd import PPSGD\nfrom flwr_ppsgd.legacy import PPSGDStrategy")
    assert not loaded & {"torch", "ray", "matplotlib", "flwr.superlink", "flwr_ppsgd.client"}


class Tensor:
    """What of a torch tensor ``Minibatches`` uses."""

    def __init__(self, values: list[float]) -> None:
        self._values = np.array(values)

    def __len__(self) -> int:
        return len(self._values)

    def detach(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def numpy(self) -> NDArray[np.float64]:
        return self._values


def test_minibatches_take_tensors_without_loading_torch() -> None:
    batches = flwr_ppsgd.Minibatches(Tensor([1, 2]), Tensor([3, 4]), 2, seed=0, user=0)
    x, y = batches(1)
    assert sorted(x) == [1, 2]
    assert sorted(y) == [3, 4]


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
        tree = ast.parse(path.read_text(encoding="utf-8"))
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        roots = {str(node.module).split(".")[0] for node in froms}
        assert not roots & {"flwr", "torch", "ray"}
