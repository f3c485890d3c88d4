"""Own data on every engine: the same w and the same measures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.engine import EngineSetting
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.run import run, run_as_cohort
from flwr_ppsgd.lab.tasks import finite_population, learner_for
from tests.lab.test_problem import read
from tests.support.loaded import loaded_by
from tests.support.own_data import USERS, arrays, write
from tests.support.toy import flat

MEASURES = {"classification": "accuracy", "regression": "rmse", "multi-label": "precision_at_1"}


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("classification", {"target_shift": 0.1}),
        ("regression", {"target_shift": 2.0}),
        ("multi-label", {"target_shift": 0.1}),
        ("classification", {"loss": "softmax"}),
    ],
)
def test_both_engines_agree(tmp_path: Path, task: str, changes: dict[str, Any]) -> None:
    """The same data, cohorts, minibatches and noise: the same w up to the grid of the noise, the
    same measures."""
    experiment = read(write(tmp_path, task), bias=True, **changes)
    process, cohort = run(experiment), run_as_cohort(experiment)
    assert process.ledger == cohort.ledger
    np.testing.assert_allclose(flat(process.w), flat(cohort.w), atol=1e-7)
    assert MEASURES[task] in process.rows[-1].measures
    for ours, theirs in zip(process.rows, cohort.rows, strict=True):
        assert ours.round == theirs.round
        assert ours.deployed_epsilon == theirs.deployed_epsilon
        shared = {name: theirs.measures[name] for name in ours.measures}
        assert ours.measures == pytest.approx(shared, rel=1e-6)
    assert process.rows[0] != process.rows[-1]


NO_IMAGES = "the cnn is for classes of images of 28 × 28 = 784 pixels and this has 4"
NO_CLASSES = "softmax is for classification and this is regression"


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("regression", {"loss": "softmax"}, NO_CLASSES),
        ("classification", {"target_shift": 2.0}, r"must be in \[0, 1\), got 2"),
        ("classification", {"model": "cnn"}, NO_IMAGES),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, task: str, changes: dict[str, Any], message: str
) -> None:
    experiment = read(write(tmp_path, task), **changes)
    for train in (run, run_as_cohort):
        with pytest.raises(ValueError, match=message):
            train(experiment)


def test_the_cnn_agrees_on_both_engines(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (len(arrays()["user"]), 784), dtype=np.uint8)
    experiment = read(write(tmp_path, x=pixels), model="cnn", rounds=2, evaluate_every=2)
    process, cohort = run(experiment), run_as_cohort(experiment)
    assert len(flat(process.w)) == 26_000 - 32 * 7  # the head has 3 classes here
    np.testing.assert_allclose(flat(process.w), flat(cohort.w), atol=1e-4)
    ours, theirs = process.rows[-1].measures, cohort.rows[-1].measures
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"])
    assert theirs["accuracy_worst_tenth"] <= theirs["accuracy_mean_user"]


def test_a_learner_is_built_from_a_run_config(tmp_path: Path) -> None:
    """As a Flower worker does it, which has nothing but the run config and its number."""
    config = read(write(tmp_path)).to_flat()
    node: Any = SimpleNamespace(node_config={"partition-id": 3}, run_config=config)
    assert learner_for(node).num_examples == 7


def test_exhausted_users_drop_out(tmp_path: Path) -> None:
    """Everyone visits exactly ⌊passes·n_i/m⌋ times, if the rounds last; without it the visits
    depend on chance."""
    path = write(tmp_path)
    changes = {"rate": None, "cohort_size": 4, "passes": 2, "rounds": None, "drop_exhausted": True}
    experiment: Experiment = read(path, **changes)
    training = experiment.training
    setting = EngineSetting(training.release(), training.steps())
    engine = experiment.task.engine([setting], 1)
    assert isinstance(engine, LinearEngine)
    most = finite_population(experiment.problem, "float64", 2.0).most_visits
    assert most is not None
    for _ in range(3 * training.rounds):
        engine.advance()
    assert engine.visits.tolist() == most.tolist()


def test_users_without_test_rows_are_not_measured(tmp_path: Path) -> None:
    rows = finite_population(Problem(data=str(write(tmp_path))), "float64")
    assert rows.parts["test"].measured_users.tolist() == [user for user in range(USERS) if user % 4]


def test_a_run_that_leaves_for_infinity_says_so(tmp_path: Path) -> None:
    experiment = read(write(tmp_path, "regression"), step=1e6)
    for train in (run, run_as_cohort):
        with pytest.raises(RuntimeError, match="training diverged"):
            train(experiment)


SWEPT = """
from flwr_ppsgd.lab.block import run_block
from flwr_ppsgd.lab.sweep import Sweep
from pathlib import Path
sweep = Sweep.load(Path({path!r}), {changes!r})
assert run_block(sweep.base.to_flat(), sweep.points(), lambda *_: None)
"""
SMALL: dict[str, Any] = {"insecure-seed": 1, "rounds": 2, "evaluate-every": 2, "step": 0.1}
SMALL |= {"noise-multiplier": 1.0, "alpha-q": [0.0, 0.3]}
OWN = {"rate": 0.5, "baselines": "fine-tuned", "delta": 1e-4, "method": "paper"}


@pytest.mark.parametrize("data", ["synthetic", "own"])
def test_a_worker_of_a_linear_sweep_loads_neither_torch_nor_matplotlib(
    tmp_path: Path, data: str
) -> None:
    path = "sweep"
    changes: dict[str, Any] = {"population": 4, "features": 6}
    if data == "own":
        path = "own-data-sweep"
        changes = {"data": str(write(tmp_path)), **OWN}
    loaded = loaded_by(SWEPT.format(path=path, changes={**SMALL, **changes}))
    assert not loaded & {"torch", "matplotlib", "ray"}


CLIENT = """
import flwr_ppsgd.lab.client_app
from flwr.app import Context, RecordDict
from flwr_ppsgd.lab.tasks import learner_for
node = {"partition-id": 1}
context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=CONFIG)
assert learner_for(context).num_examples
"""
NOT_FOR_CLIENTS = {"dp_accounting", "scipy.stats", "scipy.optimize", "torch", "matplotlib"}
NOT_FOR_CLIENTS |= {"flwr.superlink", "flwr_ppsgd.server", "flwr_ppsgd.ledger"}
NOT_FOR_CLIENTS |= {"flwr_ppsgd.epsilon", "flwr_ppsgd.lab.engine"}


def test_importing_the_client_app_loads_nothing_of_the_server() -> None:
    loaded = loaded_by("import flwr_ppsgd.lab.client_app")
    assert not loaded & {*NOT_FOR_CLIENTS, "scipy"}


@pytest.mark.parametrize("data", ["synthetic", "own"])
def test_a_client_with_a_linear_model_loads_nothing_of_the_server(
    tmp_path: Path, data: str
) -> None:
    config: dict[str, Any] = {"population": 9, "features": 6, "batch-size": 3}
    if data == "own":
        config = read(write(tmp_path)).to_flat()
    loaded = loaded_by(f"CONFIG = {config!r}\n{CLIENT}")
    assert not loaded & NOT_FOR_CLIENTS
