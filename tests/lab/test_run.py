"""An experiment from file to output directory, with few users and rounds."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd import Ledger
from flwr_ppsgd.lab import figures
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.outputs import SavedRun, check_free, free_directory, save
from flwr_ppsgd.lab.rows import RunRow
from flwr_ppsgd.lab.run import RunOutcome, run, run_as_cohort
from flwr_ppsgd.lab.sweep import Sweep
from flwr_ppsgd.lab.synthetic import Synthetic
from tests.support.own_data import write
from tests.support.toy import flat

SMALL: dict[str, Any] = {"population": 4, "features": 6, "rounds": 3, "evaluate-every": 1}
FILES = {"config.toml", "metrics.jsonl", "privacy.json", "model.npz", "learning.png"}


def small(**changes: Any) -> Experiment:
    """The shipped experiment with 4 users; ``alpha_q=0.0`` for ``alpha-q = 0.0``."""
    given = {name.replace("_", "-"): value for name, value in changes.items()}
    return Experiment.load(overrides={**SMALL, **given})


def w(outcome: RunOutcome) -> list[float]:
    found: list[float] = flat(outcome.w).tolist()
    return found


@pytest.fixture(scope="module")
def outcome() -> RunOutcome:
    return run(small(insecure_seed=1))


def test_the_shipped_experiment_is_the_default() -> None:
    experiment = Experiment.load()
    training = experiment.training
    assert experiment.problem.data == "synthetic"
    assert (training.population, training.rate, training.rounds) == (100, 1.0, 100)
    assert (training.insecure_seed, training.max_epsilon) == (None, None)


@pytest.mark.parametrize("text", [b"population = ", b"rounds 3", b"a = 1\na = 2", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(text)
    with pytest.raises(ValueError, match=r"bad\.toml: cannot be read"):
        Experiment.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("features", 4, "at least 5, got 4"),
        ("batch-size", 0, "at least 1, got 0"),
        ("precision", "half", "got 'half'"),
    ],
)
def test_data_that_does_not_exist_is_refused(key: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=f"synthetic.toml: {key} must be .*{rule}"):
        Experiment.load(overrides={key: value})


def test_rows_are_the_evaluated_rounds_with_epsilon_of_the_ledger(outcome: RunOutcome) -> None:
    """Round 0 is before training and costs nothing; ε after t rounds is that of t releases."""
    assert [row.round for row in outcome.rows] == [0, 1, 2, 3]
    spent = [Ledger(1e-4).record(outcome.release, row.round).epsilon() for row in outcome.rows]
    assert [row.deployed_epsilon for row in outcome.rows] == spent
    assert [row.epsilon for row in outcome.rows] == [0.0, math.inf, math.inf, math.inf]
    assert outcome.ledger.epsilon() == spent[-1] > spent[1] > spent[0] == 0
    assert not outcome.stopped


def test_the_first_row_is_the_risk_of_zero(outcome: RunOutcome) -> None:
    """w = θ = 0 before training: the mean over users of ‖θ_i*‖²_Σ."""
    problem = Synthetic.draw(4, 6, seed=outcome.experiment.problem.data_seed)
    risks = [problem.excess_risk(user, np.zeros(6)) for user in range(4)]
    assert outcome.rows[0].measures["excess_risk"] == pytest.approx(np.mean(risks))


@pytest.mark.parametrize(("every", "rounds"), [(0, []), (2, [0, 2, 3]), (3, [0, 3])])
def test_evaluate_every_says_which_rounds_have_rows(every: int, rounds: list[int]) -> None:
    assert [row.round for row in run(small(evaluate_every=every)).rows] == rounds


def test_an_insecure_seed_repeats_the_run(outcome: RunOutcome) -> None:
    again = run(small(insecure_seed=1))
    assert w(again) == w(outcome)
    assert again.rows == outcome.rows
    assert w(run(small(insecure_seed=2))) != w(outcome)


def test_epsilon_in_the_settings_holds_after_the_planned_rounds(tmp_path: Path) -> None:
    settings = small().to_flat()
    del settings["noise-multiplier"]
    calibrated = run(Experiment.read({**settings, "epsilon": 1.5}, where="here"))
    assert calibrated.rows[-1].epsilon == pytest.approx(1.5, rel=1e-6)
    assert calibrated.rows[-1].epsilon <= 1.5
    save(calibrated, tmp_path / "out")
    resolved = Experiment.load(tmp_path / "out" / "config.toml").training
    assert resolved.epsilon is None
    assert resolved.noise_multiplier == calibrated.release.noise_multiplier


def test_the_output_directory_is_complete(outcome: RunOutcome, tmp_path: Path) -> None:
    """Settings that can be loaded again, a line for each row, the ledger, and w."""
    save(outcome, tmp_path / "deep" / "out")
    out = tmp_path / "deep" / "out"
    assert {path.name for path in out.iterdir()} == FILES
    assert Experiment.load(out / "config.toml") == outcome.experiment
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {tuple(line.pop("outside_the_guarantee")) for line in lines} == {("excess_risk",)}
    assert [RunRow.from_json(line) for line in lines] == outcome.rows
    privacy = json.loads((out / "privacy.json").read_text())
    assert Ledger.from_json(json.dumps(privacy["ledger"])) == outcome.ledger
    assert privacy["statement"] == outcome.privacy_data()["statement"]
    with np.load(out / "model.npz") as model:
        assert model["w"].reshape(-1).tolist() == w(outcome)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_failure_while_drawing_leaves_everything_as_it_was(
    outcome: RunOutcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Pictures are drawn last, before there is an output directory, which appears as a whole."""
    out = tmp_path / "out"
    if is_there:
        out.mkdir()

    def draw_and_fail(saved: SavedRun) -> None:
        assert {path.name for path in saved.directory.iterdir()} == FILES - {"learning.png"}
        assert out.exists() == is_there
        raise RuntimeError("no ink")

    with monkeypatch.context() as broken:
        broken.setattr(figures, "draw_run", draw_and_fail)
        with pytest.raises(RuntimeError, match="no ink"):
            save(outcome, out)
    assert list(tmp_path.rglob("*")) == [out] * is_there
    save(outcome, out)
    assert {path.name for path in out.iterdir()} == FILES
    assert out.stat().st_mode & 0o777 == 0o755, "others may read it"


def test_what_has_come_in_the_meantime_is_not_overwritten(
    outcome: RunOutcome, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("data")
    with pytest.raises(ValueError, match="already holds something: choose another directory"):
        save(outcome, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "precious").read_text() == "data"


@pytest.mark.parametrize("place", ["file", "file/out"])
def test_a_file_in_the_way_is_refused_before_any_work(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("data")
    with pytest.raises(ValueError, match="--out"):
        check_free(tmp_path / place)


def test_new_directories_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert free_directory("mine") == Path("runs/mine")
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine-2").touch()
    assert free_directory("mine") == Path("runs/mine-3")


# --- on a cohort engine


def test_a_cohort_run_is_the_run_of_the_other_engine() -> None:
    """Up to the noise grid: ε and the ledger are the same."""
    experiment = small(insecure_seed=1, rounds=5, evaluate_every=2)
    ours, theirs = run_as_cohort(experiment), run(experiment)
    assert [row.round for row in ours.rows] == [0, 2, 4, 5]
    for row, other in zip(ours.rows, theirs.rows, strict=True):
        assert row.deployed_epsilon == other.deployed_epsilon
        assert row.measures == pytest.approx(dict(other.measures), rel=1e-6)
    assert w(ours) == pytest.approx(w(theirs), rel=1e-6)
    assert ours.ledger == theirs.ledger


def recipe(directory: Path) -> Experiment:
    settings = {"method": "auto", "data": str(write(directory)), "epsilon": 2.0, "delta": 1e-4}
    return Experiment.read(settings, where="here")


@pytest.mark.parametrize(
    "changes", [{}, {"insecure_seed": 1}, {"alpha_q": 0.0}, {"noise_multiplier": 0.0}]
)
def test_a_cohort_run_claims_no_guarantee(changes: dict[str, Any]) -> None:
    """It sums in floating point: with or without a seed, its noise is for simulation."""
    outcome = run_as_cohort(small(**changes))
    data = outcome.privacy_data()
    assert data["guarantee"] == "none"
    assert str(data["noise"]).startswith("simulation noise")
    assert str(data["statement"]).startswith("NO GUARANTEE: simulation noise")
    assert data["rounds_trained"] == 3
    published = [row for row in outcome.rows if row.round and changes.get("alpha_q") != 0]
    assert all(math.isinf(row.epsilon) for row in published)


def test_a_cohort_run_of_the_recipe_claims_no_guarantee_and_a_run_does(tmp_path: Path) -> None:
    """Its seed is drawn and written down, so that it is repeated from its settings."""
    simulated = run_as_cohort(recipe(tmp_path))
    data = simulated.privacy_data()
    assert data["guarantee"] == "none"
    assert str(data["statement"]).startswith("NO GUARANTEE")
    assert math.isinf(simulated.rows[-1].epsilon)
    assert 1.9 < simulated.rows[-1].deployed_epsilon <= 2
    again = run(Experiment.read(simulated.experiment.to_flat(), where="here"))
    assert w(again) == w(simulated)
    real = run(recipe(tmp_path))
    assert real.privacy_data()["guarantee"] != "none"
    assert real.rows[-1].epsilon == real.rows[-1].deployed_epsilon <= 2
    assert w(real) != w(simulated)


def test_the_papers_method_and_sweeps_have_no_default_for_epsilon_or_delta(tmp_path: Path) -> None:
    """As the recipe has none, which the contract tests hold."""
    paper = {"data": str(write(tmp_path)), "method": "paper"}
    with pytest.raises(ValueError, match="delta must be given, there is no default"):
        Experiment.load(overrides={**paper, "epsilon": 2.0})
    with pytest.raises(ValueError, match="epsilon"):
        Experiment.load(overrides={**paper, "delta": 1e-5})
    with pytest.raises(ValueError, match="delta must be given, there is no default"):
        Sweep.load(None, {"data": paper["data"]})


def test_a_budget_ends_a_cohort_run() -> None:
    outcome = run_as_cohort(small(rounds=9, max_epsilon=0.6))
    assert 0 < outcome.ledger.rounds < 9
    assert outcome.ledger.epsilon() <= 0.6
