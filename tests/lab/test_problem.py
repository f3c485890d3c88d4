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
    flat = {
        **FLAT,
        "data": str(path),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return Experiment.read(
        {key: value for key, value in flat.items() if value is not None}, where="here"
    )


def test_the_population_is_the_number_of_users(tmp_path: Path) -> None:
    experiment = read(write(tmp_path))
    assert experiment.training.population == USERS
    data = experiment.problem.data
    assert read(data, population=USERS, users=20).training.population == USERS
    assert read(data, users=5).training.population == 5
    assert read(data, min_train=6).training.population == USERS - 2


def test_another_population_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"here: population is 100 and .*npz has 9 users: leave population out"
    ):
        read(write(tmp_path), population=100)


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
    changes: dict[str, Any] = {
        "rounds": None,
        "passes": 5,
        "rate": None,
        "cohort_mean": 3,
        "evaluate_every": None,
    }
    experiment = read(write(tmp_path), **changes, evaluations=4)
    training = experiment.training
    assert (training.rate, training.rounds, training.evaluate_every) == (3 / 9, 40, 10)
    assert Experiment.read(experiment.to_flat(), where="again") == experiment


def test_a_contradiction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="here: passes = 5 makes rounds 27 and it is given as 6: keep one"
    ):
        read(write(tmp_path), passes=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"passes": 0.0, "rounds": None}, "passes must be positive and finite, got 0.0"),
        ({"passes": "two", "rounds": None}, "passes must be of type float, got 'two'"),
        (
            {"evaluations": 2, "evaluate_every": None, "rounds": None},
            "'rounds' is missing: evaluations needs it",
        ),
        (
            {"task": "ranking"},
            "task must be 'classification' or 'multi-label' or 'regression', got 'ranking'",
        ),
        ({"model": "mlp"}, "model must be 'linear' or 'cnn', got 'mlp'"),
        ({"min_train": 0}, "min-train must be at least 1, got 0"),
        ({"min_train": "2"}, "min-train must be of type int, got '2'"),
        ({"step": [0.1, 0.2]}, "step is a list: that is for ppsgd sweep"),
        ({"drop_exhausted": True}, "drop-exhausted needs passes"),
        ({"alpha_q": "theory"}, "alpha-q must be of type float, got 'theory'"),
        (
            {"baselines": "fedprox"},
            "baselines must be of fine-tuned, solved, fedavg, fedavg-solved, got 'fedprox'",
        ),
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


@pytest.mark.parametrize(
    "missing", ["data.npz", "emnist_all.sqlite.lzma", "stackoverflow.sqlite", "folder"]
)
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ValueError, match=missing) as refusal:
        read(tmp_path / missing)
    assert "\n" not in str(refusal.value)


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


def test_every_preset_is_read_and_says_what_it_is(tmp_path: Path) -> None:
    path = write(tmp_path)
    images = tmp_path / "images.npz"
    np.savez(images, **{**arrays(), "x": np.zeros((len(arrays()["user"]), 784), dtype=np.uint8)})
    assert {"figure-1a", "figure-1b", "figure-1c", "figure-1d", "figure-2", "own-data"} <= set(
        presets()
    )
    for name, what in presets().items():
        data: dict[str, Any] = (
            {} if name.startswith(("figure-1a", "sweep", "synthetic")) else {"data": str(path)}
        )
        data |= {"data": str(images)} if "1d" in name else {}
        data |= {"cohort-mean": 3} if "cohort-mean" in load_text(name) else {}
        data |= {"cohort-size": 3} if "cohort-size" in load_text(name) else {}
        priced = "epsilon =" in load_text(name)
        data |= {"noise-multiplier": 1.0} if priced else {}
        data |= {"delta": 1e-5} if name.startswith("own-data") else {}
        data |= {"epsilon": 2.0} if name in ("own-data", "own-data-paper") else {}
        single = name in ("own-data", "own-data-paper", "synthetic")
        assert len(what) > 20
        if single:
            Experiment.load(Path(name), data)
            continue
        sweep = Sweep.load(Path(name), data)
        rows_of_their_own = sweep.base.problem.data != "synthetic"
        linear = sweep.base.problem.model == "linear"
        honest = sweep.base.training.cohort_size is None  # ε, which the recipe can be planned for
        assert ("auto" in sweep.methods) == (rows_of_their_own and linear and honest), name


def load_text(name: str) -> str:
    return (PRESETS / f"{name}.toml").read_text(encoding="utf-8")


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'figure-1c'"):
        Experiment.load(Path("figure-1cc"))
