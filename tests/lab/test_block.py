"""A block that was killed: taken up where it was saved, with the same rows to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_ppsgd.lab import block as blocks
from flwr_ppsgd.lab.baselines import LocalStepsEngine
from flwr_ppsgd.lab.block import Snapshot, clear_snapshots, run_block
from flwr_ppsgd.lab.engine import Engine
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.network_engine import NetworkEngine
from flwr_ppsgd.lab.rows import Point
from flwr_ppsgd.lab.sweep import Sweep
from flwr_ppsgd.learner import Minibatches
from tests.lab.test_linear_engine import OFFSETS, X, Y, grid_of, table
from tests.lab.test_sweep import load
from tests.models.test_torch_model import MODELS, digits


def quiet(round_: int, best: object) -> None:
    """Hears of a round."""


class KilledError(Exception):
    """Stands for a kill at any moment."""


@pytest.fixture(autouse=True)
def save_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(blocks, "SHARE", 0)


def block_of(sweep: Sweep) -> list[Point]:
    """The settings of one seed, among them some that diverge."""
    return [point for point in sweep.points() if point.seed == 1]


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("killed_at", [0, 1, 3, 4, 6])
def test_a_killed_block_ends_with_the_same_rows(
    tmp_path: Path, killed_at: int, average: bool
) -> None:
    """Killed before the report of a round, and after one in which settings had diverged."""
    sweep = load(tmp_path, average=average)
    flat, block = sweep.base.to_flat(), block_of(sweep)
    whole = run_block(flat, block, quiet)
    assert any(row.diverged for row in whole)

    def kill(round_: int, best: object) -> None:  # noqa: ARG001
        if round_ == killed_at:
            raise KilledError

    with pytest.raises(KilledError):
        run_block(flat, block, kill, tmp_path)
    heard: list[int] = []
    assert run_block(flat, block, lambda round_, best: heard.append(round_), tmp_path) == whole  # noqa: ARG005
    assert heard == list(range(killed_at, 7))


def test_a_damaged_file_is_reported_and_the_block_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = load(tmp_path)
    flat, block = sweep.base.to_flat(), block_of(sweep)
    whole = run_block(flat, block, quiet, tmp_path)
    (saved,) = tmp_path.glob(".block-*.npz")
    saved.write_bytes(saved.read_bytes()[:-100])
    assert run_block(flat, block, quiet, tmp_path) == whole
    assert "begins anew" in caplog.text


def test_a_full_disk_costs_the_snapshot_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    sweep = load(tmp_path)
    monkeypatch.setattr(np, "savez", full)
    rows = run_block(sweep.base.to_flat(), block_of(sweep), quiet, tmp_path)
    assert max(row.round for row in rows) == 6
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.glob(".block-*"))


def test_only_blocks_to_be_taken_up_are_kept(tmp_path: Path) -> None:
    sweep = load(tmp_path)
    both = [block_of(sweep)[:4], block_of(sweep)[4:]]
    for block in both:
        run_block(sweep.base.to_flat(), block, quiet, tmp_path)
    torn = tmp_path / ".block-torn.npz.partial"
    torn.write_bytes(b"half")
    clear_snapshots(tmp_path, [both[1]])
    assert list(tmp_path.glob(".block-*")) == [Snapshot(tmp_path, both[1]).path]


def cohort(average: bool) -> Engine:
    return LinearEngine(table(test=(X, Y, OFFSETS)), grid_of(), seed=3, average=average)


def local_steps(average: bool) -> Engine:  # noqa: ARG001
    return LocalStepsEngine(
        table(test=(X, Y, OFFSETS)), grid_of(), seed=3, local_steps=2, dtype="float64"
    )


def networks(average: bool) -> Engine:
    torch.manual_seed(0)
    model, users = MODELS["additive head"](), grid_of()[0].release.cohort.population
    batches = [Minibatches(*digits(5), 2, seed=1, user=user) for user in range(users)]
    return NetworkEngine(model, batches, grid_of()[::7], seed=3, average=average)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("make", [cohort, local_steps, networks])
def test_an_engine_goes_on_from_its_state(make: Callable[[bool], Engine], average: bool) -> None:
    """After three rounds, with one setting dropped: the same w at every later round."""
    ours, fresh = make(average), make(average)
    several(ours, 3)
    ours.drop({ours.places[1]})
    state = {name: np.array(values) for name, values in ours.state().items()}
    fresh.restore(state)
    assert (fresh.round, fresh.places) == (3, ours.places)
    several(ours, 4)
    several(fresh, 4)
    for place in ours.places:
        np.testing.assert_array_equal(fresh.w(place), ours.w(place))
    assert fresh.measures() == ours.measures()


def several(engine: Engine, rounds: int) -> None:
    for _ in range(rounds):
        engine.advance()


def test_a_file_of_another_format_is_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers in it may mean something else: the block begins anew, with the same rows."""
    sweep = load(tmp_path)
    flat, block = sweep.base.to_flat(), block_of(sweep)
    with monkeypatch.context() as before:
        before.setattr(blocks, "FORMAT", 1)
        whole = run_block(flat, block, quiet, tmp_path)
    heard: list[int] = []
    assert run_block(flat, block, lambda round_, best: heard.append(round_), tmp_path) == whole  # noqa: ARG005
    assert heard == list(range(7))
