"""Which data an experiment runs on, what is worked out from them, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.presets import PRESETS, presets
from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.run import run
from flwr_ppsgd.lab.sweep import Sweep
from tests.support.own_data import FLAT, USERS, arrays, write


def read(path: Path | str, **changes: Any) -> Experiment:
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    flat = {**FLAT, "data": str(path), **changed}
    given = {key: value for key, value in flat.items() if value is not None}
    return Experiment.read(given, where="here")


def test_the_population_is_the_number_of_users(tmp_path: Path) -> None:
    experiment = read(write(tmp_path))
    assert experiment.training.population == USERS
    data = experiment.problem.data
    assert read(data, population=USERS, users=20).training.population == USERS
    assert read(data, users=5).training.population == 5
    assert read(data, min_train=6).training.population == USERS - 2


def test_rounds_from_passes_draw_every_sample_so_often(tmp_path: Path) -> None:
    """Σ n_i = 72 training rows; a round draws q·Σ m_i = .5·9·3 = 13.5 of them on average: 5 passes
    are 26.7 rounds."""
    experiment = read(write(tmp_path), rounds=None, passes=5)
    assert experiment.training.rounds == round(5 * 72 / 13.5) == 27
    public = "provided that the total number of samples, 72, is public"
    assert public in experiment.describe()
    assert experiment.conditions()[-1].startswith(public)
    assert len(read(experiment.problem.data).conditions()) == 1


def test_what_stands_for_something_else_is_kept_beside_it(tmp_path: Path) -> None:
    cohorts: dict[str, Any] = {"rate": None, "cohort_mean": 3}
    rounds: dict[str, Any] = {"rounds": None, "passes": 5, "evaluate_every": None, "evaluations": 4}
    experiment = read(write(tmp_path), **cohorts, **rounds)
    training = experiment.training
    assert (training.rate, training.rounds, training.evaluate_every) == (3 / 9, 40, 10)
    assert Experiment.read(experiment.to_flat(), where="again") == experiment


OTHER_TASK = "task must be 'classification' or 'multi-label' or 'regression', got 'ranking'"
BASELINE = "baselines must be of fine-tuned, solved, fedavg, fedavg-solved, got 'fedprox'"
NO_ROUNDS = {"evaluations": 2, "evaluate_every": None, "rounds": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 100}, "npz has 9 users: leave population out"),
        ({"passes": 5}, "passes = 5 makes rounds 27 and it is given as 6: keep one"),
        ({"passes": 0.0, "rounds": None}, "passes must be positive and finite, got 0.0"),
        ({"passes": "two", "rounds": None}, "passes must be of type float, got 'two'"),
        (NO_ROUNDS, "'rounds' is missing: evaluations needs it"),
        ({"task": "ranking"}, OTHER_TASK),
        ({"model": "mlp"}, "model must be 'linear' or 'cnn', got 'mlp'"),
        ({"min_train": 0}, "min-train must be at least 1, got 0"),
        ({"min_train": "2"}, "min-train must be of type int, got '2'"),
        ({"step": [0.1, 0.2]}, "step is a list: that is for ppsgd sweep"),
        ({"drop_exhausted": True}, "drop-exhausted needs passes"),
        ({"alpha_q": "theory"}, "alpha-q must be of type float, got 'theory'"),
        ({"baselines": "fedprox"}, BASELINE),
        ({"model": "cnn", "loss": "softmax"}, "the cnn has a loss of its own"),
    ],
)
def test_a_bad_setting_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="here: ") as refusal:
        read(write(tmp_path), **changes)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value"), [("task", "regression"), ("passes", 2.0), ("baselines", "fine-tuned")]
)
def test_what_is_for_data_of_ones_own_is_refused_without_them(key: str, value: object) -> None:
    with pytest.raises(ValueError, match="data"):
        Experiment.load(overrides={key: value})


def test_changed_data_are_refused(tmp_path: Path) -> None:
    """Under the same name: a sweep must not mix rows of two files."""
    path = write(tmp_path)
    before = read(path).to_flat()
    np.savez(path, **arrays(seed=1))
    with pytest.raises(ValueError, match="the file has changed since it was used here"):
        Experiment.read(before, where="config.toml")


def test_a_user_drops_out_after_whole_minibatches_only(tmp_path: Path) -> None:
    """2 passes over n_i samples in minibatches of 3: ⌊2n_i/3⌋ visits; rounds are the sum over 4
    users a round."""
    path = write(tmp_path)
    visits = Problem(data=str(path), batch_size=3).visits_in(2.0)
    assert visits is not None
    assert visits.tolist() == [2 * n // 3 for n in range(4, 13)]
    changes = {"rate": None, "cohort_size": 4, "passes": 2, "rounds": None, "drop_exhausted": True}
    experiment = read(path, **changes)
    assert experiment.training.rounds == -(-visits.sum() // 4)
    with pytest.raises(ValueError, match="drop-exhausted is simulation only: use --engine cohort"):
        run(experiment)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_read_and_says_what_it_is(tmp_path: Path, name: str) -> None:
    text = (PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    assert len(presets()[name]) > 20
    changes: dict[str, Any] = {}
    if not name.startswith(("figure-1a", "sweep", "synthetic")):
        x = np.zeros((len(arrays()["user"]), 784 if "1d" in name else 4), dtype=np.uint8)
        changes["data"] = str(write(tmp_path, x=x))
    for key in ("cohort-mean", "cohort-size"):
        changes |= {key: 3} if key in text else {}
    changes |= {"noise-multiplier": 1.0} if "epsilon =" in text else {}
    if name.startswith("own-data"):
        changes["delta"] = 1e-5
    if name in ("own-data", "own-data-paper", "synthetic"):
        changes |= {} if name == "synthetic" else {"epsilon": 2.0}
        Experiment.load(Path(name), changes)
        return
    sweep = Sweep.load(Path(name), changes)
    has_rows = sweep.base.problem.data != "synthetic"
    is_linear = sweep.base.problem.model == "linear"
    # otherwise there is no ε for which the recipe can be planned
    is_poisson = sweep.base.training.cohort_size is None
    assert ("auto" in sweep.methods) == (has_rows and is_linear and is_poisson)


def test_the_papers_figures_are_presets() -> None:
    paper = {"figure-1a", "figure-1b", "figure-1c", "figure-1d", "figure-2", "own-data"}
    assert paper <= set(presets())


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'figure-1c'"):
        Experiment.load(Path("figure-1cc"))
