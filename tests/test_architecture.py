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
from flwr_ppsgd import simulation
from tests.support.paths import ROOT

PACKAGE = Path(flwr_ppsgd.__file__).parent
# A file imports only what stands above it: in the first list, and then in its own folder's.
GROUND_FLOOR = """
    door callers checks disk records arrays algorithm optimizers tuning noise secure
    epsilon privacy recipe promise wire signature learner theory settings client
    server legacy models data simulation experiments results plan recipe_plan audit cli
"""
FOLDERS = {
    "secure": "terms shamir keys masks graph messages participant coordinator",
    "client": """
        connection refusal policy mods shelf sent personal visit secure message_api
        legacy_api model
    """,
    "server": """
        training private_log record chain checkpoint journal budget ledgers curator status enrolment
        tensorboard rounds secure_rounds fetch numpy_clients message_api legacy_api
    """,
    "models": """
        ridge logistic linear batch blocks backbone representation losses loaders torch_optimizer
        torch_server head twin steps chain split_learner split additive_head cnn torch_app
    """,
    "data": """
        split per_user raw columns frames features scaling tables npz files cache tff emnist
        stackoverflow public synthetic learners by_name look
    """,
    "simulation": """
        flower_internals grid measures products batches ahead thetas engine linear networks learners
        baselines
    """,
    "experiments": """
        shipped problem rows tasks people settings client_app run sweep snapshot blocks outputs
        predict workers server_app flwr_run
    """,
    "results": "summary plots people figures page",
}
FLOORS = {"": GROUND_FLOOR.split(), **{name: files.split() for name, files in FOLDERS.items()}}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules of this package that a file imports, anywhere in it, as ``client.shelf``.

    What is imported for types alone does not count.
    """
    found = set()
    for node in running(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flwr_ppsgd"):
            inside = str(node.module).removeprefix("flwr_ppsgd").removeprefix(".")
            for alias in node.names:
                longer = f"{inside}.{alias.name}".removeprefix(".")
                found.add(longer if known(longer) else inside)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            own = [name for name in names if name.startswith("flwr_ppsgd.")]
            found |= {name.removeprefix("flwr_ppsgd.") for name in own}
    return frozenset(found)


def running(tree: ast.AST) -> list[ast.AST]:
    """All nodes that run, those under ``if TYPE_CHECKING`` left out."""
    found = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return found


def known(module: str) -> bool:
    return any(name_of(path) == module for path in MODULES)


def place(module: str) -> tuple[int, int]:
    """Where a module stands: its floor, and its place in its folder."""
    folder, _, file = module.partition(".")
    return FLOORS[""].index(folder), FLOORS[folder].index(file) if file else 0


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    own = name_of(path)
    for other in imports(path):
        assert other, f"{own} imports from the root: import from the module that defines the name"
        assert place(other) < place(own), f"{own} must not import {other}"


def test_every_module_has_its_place() -> None:
    listed = {name for name in FLOORS[""] if name not in FOLDERS}
    for folder in FOLDERS:
        listed |= {f"{folder}.{file}" for file in FLOORS[folder]}
    assert {name_of(path) for path in MODULES} <= listed


def test_server_and_client_never_import_each_other() -> None:
    for path in MODULES:
        own = name_of(path).partition(".")[0]
        others = {name.partition(".")[0] for name in imports(path)}
        assert not (own == "client" and "server" in others), path
        assert not (own == "server" and "client" in others), path


@pytest.mark.parametrize("door", [flwr_ppsgd, flwr_ppsgd.legacy, simulation])
def test_all_is_exactly_what_a_door_exports(door: object) -> None:
    names = list(vars(door)["__all__"])
    assert sorted(dir(door)) == sorted(set(names))
    for name in names:
        assert getattr(door, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        door.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_doors_names_for_type_checkers_are_those_that_are_loaded() -> None:
    """The imports under TYPE_CHECKING and the table of homes say the same."""
    for door in (flwr_ppsgd, flwr_ppsgd.legacy, simulation):
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
SERVER = {"flwr_ppsgd.server", "flwr_ppsgd.privacy", "flwr_ppsgd.epsilon"}
CLIENTS = [
    "from flwr_ppsgd import client_app; client_app(print)",
    "from flwr_ppsgd.legacy import PPSGDClient",
    "from flwr_ppsgd import AdditiveLinear, Learner, Minibatches, PersonalModel, personalize",
    "import flwr_ppsgd.experiments.client_app",
    "import simulations.client_app",
    "import simulations.deployment.client_app",
]
TORCH_CLIENTS = [
    "from flwr_ppsgd import torch_client, torch_learner, shared_arrays",
    "import simulations.text.client_app",
    "import simulations.adapters.client_app",
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
    values = ("algorithm", "noise", "epsilon", "privacy", "promise")
    core = [PACKAGE / f"{name}.py" for name in values]
    for path in [*core, *(PACKAGE / "secure").glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        roots = {str(node.module).split(".")[0] for node in froms}
        assert not roots & {"flwr", "torch", "ray"}
