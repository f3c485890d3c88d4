"""Grids, blocks, the store and the workers of a sweep: the same rows whatever happens."""

import functools
import json
import math
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from flwr_ppsgd import Ledger
from flwr_ppsgd.lab import outputs as store
from flwr_ppsgd.lab import workers
from flwr_ppsgd.lab.block import plan_blocks, run_block
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.outputs import open_sweep, read_config, read_rows, read_selection
from flwr_ppsgd.lab.rows import GridPoint, SweepRow
from flwr_ppsgd.lab.run import run_as_cohort
from flwr_ppsgd.lab.sweep import EpsilonCache, Sweep
from flwr_ppsgd.lab.tasks import LinearTask
from flwr_ppsgd.lab.workers import run_sweep
from tests.support.own_data import FLAT as OWN_DATA
from tests.support.own_data import write

FLAT: dict[str, Any] = {"population": 12, "features": 6, "rate": 0.5, "clip-norm": 5.0}
FLAT |= {"delta": 1e-4, "rounds": 6, "evaluate-every": 3, "noise-multiplier": [0.0, 2.0]}
FLAT |= {"step": [0.1, 0.3, 1e8], "alpha-q": [0.0, 0.3, math.inf], "insecure-seed": [1, 2]}
GIGABYTE = 10**9


@pytest.fixture
def small(tmp_path: Path) -> Sweep:
    return load(tmp_path)


def load(directory: Path, **changes: Any) -> Sweep:
    path = directory / "grid.toml"
    flat = {**FLAT, **{key.replace("_", "-"): value for key, value in changes.items()}}
    path.write_text(tomli_w.dumps({k: value for k, value in flat.items() if value is not None}))
    return Sweep.load(path)


def in_this_process(
    flat: dict[str, Any],
    blocks: Sequence[Sequence[GridPoint]],
    jobs: int,  # noqa: ARG001
    on_round: Callable[[int, int], None],
) -> Iterator[tuple[int, list[SweepRow]]]:
    """The workers without processes, which take seconds to start."""
    for number, block in enumerate(blocks):
        yield number, run_block(flat, block, functools.partial(on_round, number))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "run_in_processes", in_this_process)


def sorted_bytes(out: Path) -> list[bytes]:
    return sorted((out / store.ROWS).read_bytes().splitlines())


def test_the_grid_is_the_product_with_alpha_zero_once(small: Sweep) -> None:
    """3 steps × 2 seeds × (α = 0, and 2 α × 2 z): α = 0 is not run once per z."""
    points = small.points()
    assert len(points) == len(set(points)) == 3 * 2 * (1 + 2 * 2)
    assert all(
        (p.noise_multiplier is None) == (p.clip_norm is None) == (p.alpha_q == 0) for p in points
    )


TOO_MANY = {"step": [float(i) for i in range(1, 2000)], "insecure-seed": list(range(100))}
BAD_GRIDS: list[tuple[dict[str, Any], str]] = [
    ({"step": [0.1, 0.1]}, "'step' holds a value twice"),
    ({"step": [0.1, -1.0]}, "step must be finite and not negative, got -1.0"),
    ({"step": [0.1, "much"]}, "step must be of type float, got 'much'"),
    ({"alpha-q": [0.3, math.nan]}, "alpha-q must be in"),
    (TOO_MANY, "more than 100000"),
    ({"evaluate-every": 0}, "'evaluate-every' is missing"),
    ({"insecure-seed": None}, "'insecure-seed' is missing"),
    ({"max-epsilon": 1.0}, "'max-epsilon' has no meaning in a sweep"),
    ({"precision": "float16"}, "precision must be 'float64' or 'float32'"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD_GRIDS, ids=[message for _, message in BAD_GRIDS]
)
def test_a_bad_grid_is_refused_with_the_file_and_the_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"grid\.toml: ") as refusal:
        load(tmp_path, **changes)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("jobs", [1, 2, 7])
@pytest.mark.parametrize("memory", [GIGABYTE, 60_000])
def test_blocks_hold_every_setting_once_and_fit_in_memory(
    small: Sweep, memory: int, jobs: int
) -> None:
    chosen = plan_blocks(small, memory, jobs)
    assert sorted(point for block in chosen.blocks for point in block) == small.points()
    assert all(len({point.seed for point in block}) == 1 for block in chosen.blocks)
    assert chosen.jobs <= jobs
    assert chosen.bytes * chosen.jobs <= memory
    assert f"{len(chosen.blocks)} blocks" in str(chosen)
    if jobs == 1:  # as few as memory allows
        assert (len(chosen.blocks) == 2) == (memory == GIGABYTE)


def test_a_setting_that_can_never_fit_is_refused(small: Sweep) -> None:
    with pytest.raises(ValueError, match=r"a single setting needs .* raise --memory"):
        plan_blocks(small, 1000, 1)


@pytest.mark.usefixtures("quick")
def test_rows_are_those_of_single_runs(small: Sweep, tmp_path: Path) -> None:
    """Each setting of the sweep as a run of its own, with its own ε."""
    run_sweep(small, tmp_path / "out", memory=GIGABYTE)
    rows = read_rows(tmp_path / "out")
    for point in small.points():
        own = {row.round: row for row in rows if row.point == point}
        if point.step > 1:  # diverges, and ends there
            assert own[max(own)].diverged
            continue
        assert not any(row.diverged for row in own.values())
        settings = {**small.base.to_flat(), "step": point.step, "alpha-q": point.alpha_q}
        settings |= {"noise-multiplier": point.noise_multiplier or 0.0, "insecure-seed": point.seed}
        alone = run_as_cohort(Experiment.read(settings, where="here"))
        assert [row.round for row in alone.rows] == sorted(own) == [0, 3, 6]
        for row in alone.rows:
            swept = own[row.round]
            assert swept.measures == pytest.approx(dict(row.measures), rel=1e-8)
            assert swept.deployed_epsilon == row.deployed_epsilon


def test_epsilon_is_priced_once_for_all_settings_of_a_noise_level(
    small: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Ledger] = []

    def counted(self: Ledger) -> float:
        asked.append(self)
        return 1.0

    monkeypatch.setattr(Ledger, "epsilon", counted)
    monkeypatch.setattr(Ledger, "quick_epsilon", lambda _: 2.0)
    epsilons = EpsilonCache(small.base)
    for point in small.points():
        epsilons.price(point, 3)
    assert len(asked) == 3  # of both noise levels, and of α = 0


def test_epsilon_at_tiny_noise_is_finite_and_silent(tmp_path: Path) -> None:
    """PLD overflows at (z = .1, q = .017, 300 rounds); RDP is a bound, too."""
    sweep = load(tmp_path, noise_multiplier=0.1, rate=10 / 580, rounds=300)
    honest, _ = EpsilonCache(sweep.base).price(sweep.points()[-1], 300)
    assert 0 < honest < math.inf


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("quick")
def test_rows_cut_at_any_byte_are_completed_to_the_same_rows(
    small: Sweep, tmp_path: Path, seed: int
) -> None:
    """What a kill can leave behind: whole rows and a torn one, of any block."""
    run_sweep(small, tmp_path / "whole", memory=60_000)
    run_sweep(small, tmp_path / "cut", memory=60_000)
    path = tmp_path / "cut" / store.ROWS
    data = path.read_bytes()
    path.write_bytes(data[: random.Random(seed).randrange(len(data))])
    run_sweep(small, tmp_path / "cut", memory=GIGABYTE)
    assert sorted_bytes(tmp_path / "cut") == sorted_bytes(tmp_path / "whole")


@pytest.mark.usefixtures("quick")
def test_blocks_of_a_directory_stay_as_they_were(small: Sweep, tmp_path: Path) -> None:
    """Another limit or number of jobs does not regroup settings; one that is too low is refused."""
    plan = tmp_path / "out" / store.PLAN
    run_sweep(small, tmp_path / "out", memory=60_000)
    before = plan.read_text()
    run_sweep(small, tmp_path / "out", memory=GIGABYTE, jobs=1)
    assert plan.read_text() == before
    plan.write_text(json.dumps({**json.loads(before), "bytes": 2 * GIGABYTE}))
    with pytest.raises(ValueError, match="was begun with blocks of 2000 MB"):
        run_sweep(small, tmp_path / "out", memory=GIGABYTE)


@pytest.mark.usefixtures("quick")
def test_a_second_sweep_in_one_directory_is_refused(small: Sweep, tmp_path: Path) -> None:
    """The lock goes with the process: nothing has to be cleaned up after a kill."""
    with (
        open_sweep(tmp_path / "out", small),
        pytest.raises(ValueError, match="another sweep is writing here"),
    ):
        run_sweep(small, tmp_path / "out", memory=GIGABYTE)
    assert run_sweep(small, tmp_path / "out", memory=GIGABYTE) == 30


@pytest.mark.usefixtures("quick")
def test_a_damaged_row_is_named(small: Sweep, tmp_path: Path) -> None:
    run_sweep(small, tmp_path / "out", memory=GIGABYTE)
    path = tmp_path / "out" / store.ROWS
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"rows\.jsonl: line 1 is not a row of a sweep"):
        run_sweep(small, tmp_path / "out", memory=GIGABYTE)


def die(*_: object) -> None:
    os._exit(9)


def test_a_worker_that_dies_is_one_clear_line(
    small: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_run_in_worker", die)
    with pytest.raises(RuntimeError, match=r"a worker ended without a word.*lower --memory"):
        run_sweep(small, tmp_path / "out", memory=GIGABYTE, jobs=1)
    assert not multiprocessing.active_children()


# --- on data of one's own


def validated(path: Path) -> Sweep:
    flat = {**OWN_DATA, "data": str(path), "step": [0.01, 0.1], "select-on": "validation"}
    return Sweep.read({**flat, "baselines": "fine-tuned"}, where="here")


@pytest.mark.usefixtures("quick")
def test_a_sweep_goes_on_with_a_wider_grid(tmp_path: Path) -> None:
    """What was run stays as it is, what was added is run, and the settings say so."""
    sweep = validated(write(tmp_path))
    out = tmp_path / "out"
    count = run_sweep(sweep, out, jobs=1)
    before = (out / "rows.jsonl").read_text()
    wider = sweep.with_more_values({"step": [0.001, 1.0]})
    assert run_sweep(wider, out, jobs=1, extend=True) == count
    after = (out / "rows.jsonl").read_text()
    assert after.startswith(before)
    steps = {row.point.step for row in read_rows(out) if row.point.method == "ppsgd"}
    assert steps == {0.001, 0.01, 0.1, 1.0}
    assert read_config(out)["step"] == [0.001, 0.01, 0.1, 1.0]
    assert sweep.with_more_values(read_config(out)).grid == wider.grid
    assert run_sweep(wider, out, jobs=1, extend=True) == 0


@pytest.mark.usefixtures("quick")
def test_a_sweep_that_validates_has_trivial_answers_and_no_noise_too(tmp_path: Path) -> None:
    sweep = validated(write(tmp_path))
    assert {point.noise_multiplier for point in sweep.points()} == {0.0, 0.5}
    out = tmp_path / "out"
    run_sweep(sweep, out, jobs=1)
    trivial = {row.point: row.measures for row in read_rows(out) if not row.point.step}
    methods = ("trivial", "own-trivial")
    assert trivial.keys() == {GridPoint(0, 0.0, 0.0, None, None, name) for name in methods}
    for measures in trivial.values():
        assert measures.keys() == {"accuracy", "validation_accuracy"}
    (cost,) = read_selection(out)
    assert cost.settings == 2
    assert cost.selected > cost.epsilon


def test_the_shipped_sweep_is_the_full_size_problem() -> None:
    sweep = Sweep.load(None)
    task = sweep.base.task
    assert isinstance(task, LinearTask)
    assert (task.users, task.problem.features, len(sweep.points())) == (1000, 100, 36)
    assert len(task.population()) == 1000
