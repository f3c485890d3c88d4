"""Sweeps that hold the recipe, and baselines that are solved: grids, rows, ε, tables."""

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from flwr_ppsgd import Ledger
from flwr_ppsgd.client.visit import num_tested
from flwr_ppsgd.lab import block as blocks
from flwr_ppsgd.lab import workers
from flwr_ppsgd.lab.block import plan_blocks, run_block
from flwr_ppsgd.lab.evaluation import overall_measures, results_of
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.figures import draw_sweep
from flwr_ppsgd.lab.html_report import write_report
from flwr_ppsgd.lab.outputs import read_rows
from flwr_ppsgd.lab.rows import GridPoint, SweepRow
from flwr_ppsgd.lab.run import run_as_cohort
from flwr_ppsgd.lab.summary import summarise
from flwr_ppsgd.lab.sweep import EpsilonCache, Sweep, recipe_of
from flwr_ppsgd.lab.workers import run_sweep
from tests.lab.test_sweep import GIGABYTE, in_this_process
from tests.support.own_data import FLAT, write

PAPER = {key: value for key, value in FLAT.items() if key != "noise-multiplier"}
BOTH: dict[str, Any] = {"epsilon": [2.0, 8.0], "insecure-seed": [1, 2]}
MIXED = {**PAPER, **BOTH, "method": ["paper", "auto"], "alpha-q": [0.0, 0.3, math.inf]}
ALONE = {**BOTH, "method": "auto", "delta": 1e-4, "rounds": 3}


def rows_of(sweep: Sweep, point: GridPoint) -> list[SweepRow]:
    """The rows of one setting, without anybody who hears of rounds."""
    return run_block(sweep.base.to_flat(), [point], lambda _: None)


def sweep_of(path: Path, flat: dict[str, Any], **changes: Any) -> Sweep:
    given = {key.replace("_", "-"): value for key, value in changes.items()}
    return Sweep.read({**flat, "data": str(path), **given}, where="here")


def of(sweep: Sweep, method: str) -> list[GridPoint]:
    return [point for point in sweep.points() if point.method == method]


def test_the_recipe_has_a_grid_of_epsilon_and_seed_alone(tmp_path: Path) -> None:
    sweep = sweep_of(write(tmp_path), MIXED)
    recipes = {(point.target_epsilon, point.seed) for point in of(sweep, "auto")}
    assert recipes == {(2.0, 1), (2.0, 2), (8.0, 1), (8.0, 2)}
    assert len(of(sweep, "ppsgd")) == 2 * (1 + 2 * 2)
    assert sweep.base.training.method == "paper"
    chosen = plan_blocks(sweep, GIGABYTE, 1)
    assert all(len(block) == 1 for block in chosen.blocks if block[0].method == "auto")
    assert sorted(point for block in chosen.blocks for point in block) == sweep.points()


def run_of(data: Path, **settings: Any) -> Experiment:
    """The recipe as a run of its own."""
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    return Experiment.read(
        {"method": "auto", "data": str(data), "delta": 1e-4, **given}, where="here"
    )


def test_the_recipe_of_a_sweep_is_the_recipe_of_a_run(tmp_path: Path) -> None:
    """Whatever rounds, cohorts, batches and steps the paper's method has beside it."""
    data = write(tmp_path)
    sweep = sweep_of(data, MIXED)
    (point, _) = [point for point in of(sweep, "auto") if point.target_epsilon == 2.0]
    alone = run_of(data, epsilon=2.0, insecure_seed=1).training
    found = recipe_of(sweep.base, point).training
    assert found.recipe() == alone.recipe()
    assert found.arguments() == alone.arguments()


@pytest.mark.parametrize("flat", [ALONE, {**ALONE, "epsilon": [2.0, math.inf]}])
def test_rows_of_the_recipe_are_those_of_runs(tmp_path: Path, flat: dict[str, Any]) -> None:
    path = write(tmp_path)
    sweep = sweep_of(path, flat)
    for point in sweep.points():
        (row,) = rows_of(sweep, point)
        alone = run_of(path, rounds=3, insecure_seed=point.seed, epsilon=point.target_epsilon)
        last = run_as_cohort(alone).rows[-1]
        assert row.measures == pytest.approx(dict(last.measures), rel=1e-8)
        assert {"accuracy", "local_accuracy", "shared_accuracy"} <= row.measures.keys()
        spent, _ = EpsilonCache(sweep.base).price(point, row.round)
        assert spent == pytest.approx(last.deployed_epsilon)


def test_the_memory_of_a_recipe_is_foreseen(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(400, 1000)), draw.integers(20, size=400)
    user, test = np.repeat(np.arange(40), 10), np.arange(400) % 5 == 0
    np.savez(path := tmp_path / "wide.npz", user=user, x=x, y=y, test=test)
    sweep = sweep_of(path, {**ALONE, "epsilon": [8.0], "insecure-seed": 1})
    chosen = plan_blocks(sweep, GIGABYTE, 1)
    ((point,),) = chosen.blocks
    tracemalloc.start()
    rows_of(sweep, point)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert chosen.bytes / 2 < peak < chosen.bytes * 1.5


def test_each_epsilon_has_its_own_number_of_rounds(tmp_path: Path) -> None:
    flat = {key: value for key, value in ALONE.items() if key != "rounds"}
    sweep = sweep_of(many(tmp_path), {**flat, "epsilon": [2.0, math.inf], "insecure-seed": 1})
    planned = [recipe_of(sweep.base, point).training.rounds for point in sweep.points()]
    assert sorted(planned) == [2, 8]
    assert sweep.to_flat()["epsilon"] == [2.0, math.inf]


def test_a_sweep_of_the_recipe_needs_epsilon(tmp_path: Path) -> None:
    flat = {key: value for key, value in ALONE.items() if key != "epsilon"}
    with pytest.raises(ValueError, match="epsilon is missing: a sweep of 'auto' needs it"):
        sweep_of(write(tmp_path), flat)


def test_beside_the_papers_noise_the_recipe_gets_the_same_epsilon(tmp_path: Path) -> None:
    flat = {key: value for key, value in MIXED.items() if key != "epsilon"}
    sweep = sweep_of(write(tmp_path), flat, noise_multiplier=[0.0, 2.0])
    price = EpsilonCache(sweep.base).price
    spent = {point.noise_multiplier: price(point, 6)[0] for point in of(sweep, "ppsgd")}
    targets = sorted({point.target_epsilon for point in of(sweep, "auto")}, key=str)
    assert targets == [spent[2.0], math.inf]
    for point in of(sweep, "auto"):
        rounds = recipe_of(sweep.base, point).training.rounds
        assert price(point, rounds)[0] <= (point.target_epsilon or 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["paper", "best"], "method must be of paper, auto, got 'best'"),
        (["auto", "auto"], "'method' must hold each method once"),
        ([], "'method' must hold each method once"),
    ],
)
def test_a_method_that_is_none_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sweep_of(write(tmp_path), MIXED, method=value)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "run_in_processes", in_this_process)


@pytest.mark.usefixtures("quick")
def test_everything_stands_side_by_side(tmp_path: Path) -> None:
    """Rows, table, figures and page of both methods and all baselines, chosen on validation."""
    names = "fine-tuned, solved, fedavg, fedavg-solved"
    sweep = sweep_of(write(tmp_path), MIXED, baselines=names, select_on="validation")
    out = tmp_path / "out"
    run_sweep(sweep, out, memory=GIGABYTE)
    before = (out / "rows.jsonl").read_bytes()
    assert run_sweep(sweep, out, memory=GIGABYTE) == 0
    assert (out / "rows.jsonl").read_bytes() == before
    rows = read_rows(out)
    recipe = [row for row in rows if row.point.method == "auto"]
    assert len(recipe) == 2 * 3  # two ε and no noise, two seeds
    assert {row.round for row in recipe} == {2, 8}  # without noise eight
    assert all("validation_accuracy" in row.measures for row in recipe)
    text, written = draw_sweep(rows, out)
    assert " auto" in text
    assert {path.name for path in written} >= {"figure-1.png", "figure-2.png", "methods.png"}
    table = pd.read_csv(out / "best.csv", comment="#").to_dict("records")
    spent = summarise(rows).table.set_index("noise-multiplier")["deployed_epsilon"]
    assert len(table) == 3
    for line in table:
        for name in ("auto", *names.split(", ")):
            assert 0 <= line[name] <= 1
        epsilon = pytest.approx(spent[line["noise-multiplier"]], rel=0.02)
        own = [row.measures["accuracy"] for row in recipe if row.deployed_epsilon == epsilon]
        assert line["auto"] == pytest.approx(np.mean(own))
    curves = (out / "methods.csv").read_text(encoding="utf-8")
    assert "auto, nothing chosen" in curves
    assert "global, then solved" in curves
    write_report(out)
    assert "auto" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick")
def test_the_recipe_alone_has_a_table_and_a_figure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_sweep(sweep_of(write(tmp_path), ALONE), out, memory=GIGABYTE)
    rows = read_rows(out)
    text, written = draw_sweep(rows, out)
    assert "auto" in text
    assert "Nothing was chosen among settings" in text
    assert "optimistic" not in text
    recipe = [row for row in rows if row.point.method == "auto"]
    (alone,) = {row.measures["local_accuracy"] for row in recipe}
    assert summarise(rows).table["local-solved"].tolist() == pytest.approx([alone, alone])
    assert {path.name for path in written} >= {"methods.png", "best.csv"}
    write_report(out)


@pytest.mark.parametrize(("method", "source"), [("solved", "ppsgd"), ("fedavg-solved", "fedavg")])
def test_solved_baselines_solve_on_the_final_w(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, source: str
) -> None:
    """The w of global learning or of FedAvg, published at the same price."""
    sweep = sweep_of(write(tmp_path), FLAT, baselines="solved, fedavg, fedavg-solved")
    (point,) = of(sweep, method)
    kept: list[Any] = []
    made = blocks._block_engine

    def remembered(base: Experiment, points: Any) -> Any:
        kept.append(made(base, points))
        return kept[-1]

    monkeypatch.setattr(blocks, "_block_engine", remembered)
    (row,) = [row for row in rows_of(sweep, point) if row.measures]
    like = replace(point, alpha_q=math.inf, method=source)
    rows_of(sweep, like)
    solved_on, published = (engine.w(0) for engine in kept)
    np.testing.assert_array_equal(solved_on, published)
    (people,) = results_of(sweep.base.task.learner, [published], range(9), None)
    assert row.measures == pytest.approx(overall_measures(people), rel=1e-8)
    assert isinstance(row, SweepRow)
    price = EpsilonCache(sweep.base).price
    assert price(point, 6) == price(like, 6)


def test_validation_rows_and_not_test_rows_choose_among_solved(tmp_path: Path) -> None:
    """The learner of choosing has the same training rows, and other test rows."""
    sweep = sweep_of(write(tmp_path), FLAT, select_on="validation", baselines="solved")
    task = sweep.base.task
    w = np.random.default_rng(0).normal(size=12)
    tested = 0
    for user in range(9):
        choosing: Any = task.learner(user, on_validation=True)
        mine = cast(Any, task.learner(user)).stepped_model(w)
        other = choosing.stepped_model(w)
        np.testing.assert_array_equal(mine.mixture.slopes, other.mixture.slopes)
        tested += num_tested(choosing)
    data = task.problem.per_user()
    assert data.validation is not None
    assert tested == data.validation.sum()


def many(directory: Path) -> Path:
    """200 users with amounts."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(600, 2)), draw.normal(size=600)
    user, test = np.repeat(np.arange(200), 3), np.arange(600) % 3 == 2
    np.savez(path := directory / "many.npz", user=user, x=x, y=y, test=test)
    return path


def test_what_is_asked_before_is_part_of_the_epsilon_of_a_row(tmp_path: Path) -> None:
    flat = {**ALONE, "epsilon": [8.0], "insecure-seed": 1, "rounds": 2}
    sweep = sweep_of(many(tmp_path), flat)
    (point,) = sweep.points()
    planned = recipe_of(sweep.base, point).training.recipe()
    price = EpsilonCache(sweep.base).price
    nothing = Ledger(1e-4)
    without = nothing.record(planned.release).epsilon()
    both = nothing.record(planned.before["unit"]).record(planned.release)
    first, _ = price(point, 1)
    assert first == both.epsilon()
    assert first > without
    assert 7.9 < price(point, 2)[0] <= 8.0


def test_a_w_of_softmax_is_not_solved_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="personal models are made around a w of the squared loss"):
        sweep_of(write(tmp_path), FLAT, loss="softmax", baselines="solved")
