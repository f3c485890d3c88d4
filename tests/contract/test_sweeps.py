"""A sweep: every setting once, whatever stops it, however many jobs; and its pictures."""

import itertools
import math
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract import files
from tests.contract.command import heed_ctrl_c, ppsgd
from tests.contract.files import SCRIPT, check_done, check_refused, rows_of

STEPS = (0.1, 0.3)
ALPHAS = (0.0, 0.3, math.inf)
SEEDS = (1, 2, 3)
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
ROUNDS = (0, 500, 1000)
GRID = """
population = 30
features = 6
rate = 1.0
clip-norm = 5.0
noise-multiplier = 2.0
delta = 1e-4
step = [0.1, 0.3]
alpha-q = [0.0, 0.3, inf]
insecure-seed = [1, 2, 3]
rounds = 1000
evaluate-every = 500
"""
SWEEP = ("sweep", "grid.toml")
Setting = tuple[Any, ...]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a grid, and a sweep of it that nothing has stopped."""
    here = tmp_path_factory.mktemp("sweep")
    (here / "grid.toml").write_text(GRID)
    shown = check_done(ppsgd(*SWEEP, "--jobs", "1", "--out", "out", where=here)).words
    assert "guarantees nothing" in shown
    return here


def measures(out: Path) -> dict[Setting, float]:
    """What was measured, by setting and round; no setting has two rows for a round."""
    found: dict[Setting, float] = {}
    for row in rows_of(out / "rows.jsonl"):
        alpha = math.inf if row["alpha-q"] == "infinite" else row["alpha-q"]
        key = (row["seed"], row["step"], alpha, row["round"])
        assert key not in found
        found[key] = row["excess_risk"]
    return found


def test_every_setting_of_the_grid_has_a_row_for_each_evaluation(whole: Path) -> None:
    assert set(measures(whole / "out")) == set(itertools.product(SEEDS, STEPS, ALPHAS, ROUNDS))


def test_a_row_guarantees_nothing_and_says_what_a_deployment_would_cost(whole: Path) -> None:
    for row in rows_of(whole / "out" / "rows.jsonl"):
        published = row["alpha-q"] != 0 and row["round"] > 0
        assert row["epsilon"] == ("infinite" if published else 0)
        assert (row["deployed_epsilon"] > 0) == published


def test_two_jobs_give_the_rows_of_one(whole: Path) -> None:
    check_done(ppsgd(*SWEEP, "--jobs", "2", "--out", "two", where=whole))
    assert measures(whole / "two") == pytest.approx(measures(whole / "out"), rel=1e-9)


def test_a_setting_has_the_same_rows_without_the_others(whole: Path) -> None:
    """Settings are trained side by side, and know nothing of each other."""
    alone = ("--set", "step=[0.3]", "--set", "insecure-seed=[2]", "--set", "alpha-q=[0.3]")
    check_done(ppsgd(*SWEEP, *alone, "--jobs", "1", "--out", "alone", where=whole))
    found = measures(whole / "alone")
    assert set(found) == {(2, 0.3, 0.3, round_) for round_ in ROUNDS}
    every = measures(whole / "out")
    assert found == pytest.approx({key: every[key] for key in found}, rel=1e-9)


def test_a_sweep_that_is_stopped_twice_has_the_rows_of_one_that_was_not(whole: Path) -> None:
    """Killed without a word, then by Ctrl-C, each time after more rows; then left alone."""
    arguments = (*SWEEP, "--jobs", "1", "--out", "stopped")
    assert stopped_after_more_rows(arguments, whole, signal.SIGKILL) == -signal.SIGKILL
    assert stopped_after_more_rows(arguments, whole, signal.SIGINT) == INTERRUPTED
    done = set(measures(whole / "stopped"))
    assert 0 < len(done) < len(measures(whole / "out"))
    check_done(ppsgd(*arguments, where=whole))
    assert measures(whole / "stopped") == measures(whole / "out")
    rows = (whole / "stopped" / "rows.jsonl").read_bytes()
    check_done(ppsgd(*arguments, where=whole))  # there is nothing left to do
    assert (whole / "stopped" / "rows.jsonl").read_bytes() == rows


def stopped_after_more_rows(arguments: tuple[str, ...], where: Path, how: signal.Signals) -> int:
    """The exit status of a sweep that gets a signal as soon as it has written a row."""
    rows = where / "stopped" / "rows.jsonl"
    before = size_of(rows)
    process = subprocess.Popen(
        [SCRIPT, *arguments],
        cwd=where,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509
    )
    while size_of(rows) <= before and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(how)
    return process.wait(timeout=600)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_sweep_is_drawn(whole: Path) -> None:
    drawn = check_done(ppsgd("plot", "out", "--format", "png,svg", where=whole))
    assert "excess_risk" in drawn.out
    assert "guarantees nothing" in drawn.words
    for name in ("figure-1.png", "figure-1.svg", "figure-2.png", "best.csv"):
        assert (whole / "out" / name).stat().st_size > 0, name
        assert name in drawn.out


def test_a_directory_of_another_sweep_is_left_alone(whole: Path) -> None:
    before = (whole / "out" / "rows.jsonl").read_bytes()
    other = ("--set", "rounds=7", "--out", "out")
    check_refused(ppsgd(*SWEEP, *other, where=whole), "out", "rounds", "7", "--out")
    assert (whole / "out" / "rows.jsonl").read_bytes() == before


MISTAKES = [
    ((*SWEEP, "--set", "step=[]", "--out", "new"), ("grid.toml", "'step'")),
    ((*SWEEP, "--set", "stepp=[1.0]", "--out", "new"), ("'stepp'", "'step'")),
    ((*SWEEP, "--set", "rounds=[1, 2]", "--out", "new"), ("'rounds'",)),
    ((*SWEEP, "--jobs", "0", "--out", "new"), ("--jobs",)),
    (("sweep", "missing.toml", "--out", "new"), ("missing.toml",)),
    (("plot", "missing"), ("missing",)),
    (("plot", "out", "--format", "gif"), ("gif", "png")),
]


@pytest.mark.parametrize(("typed", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    typed: tuple[str, ...], named: tuple[str, ...], whole: Path
) -> None:
    before = sorted(whole.rglob("*"))
    check_refused(ppsgd(*typed, where=whole), *named)
    assert sorted(whole.rglob("*")) == before


def test_a_run_and_a_sweep_of_one_file_have_directories_of_their_own(tmp_path: Path) -> None:
    files.write_csv(tmp_path / "shop.csv", files.people())
    check_done(ppsgd("run", "--data", "shop.csv", *files.BUDGET, where=tmp_path))
    lists = ("--set", "step=[0.1]", "--set", "alpha-q=[0.3]", "--set", "rounds=2")
    smaller = (*lists, "--set", "epsilon=[8.0]", "--set", "insecure-seed=[1]")
    shown = check_done(
        ppsgd("sweep", "--data", "shop.csv", "--delta", "1e-3", *smaller, where=tmp_path)
    )
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"shop", "shop-sweep"}
    assert "12 users" in shown.out.splitlines()[0]
