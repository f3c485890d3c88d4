"""Budgets: of one training, and of several that share one which was fixed before the first."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context
from flwr.serverapp.exception import PrivacyBudgetExhausted

from flwr_ppsgd import (
    PPSGD,
    Ledger,
    Poisson,
    Release,
    SecureSum,
    Steps,
    affordable_rounds,
    client_app,
)
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.command import ppsgd
from tests.contract.targets import (
    DELTA,
    NOISY,
    SIZE,
    USERS,
    Target,
    flat,
    learner_for,
    nodes,
    strategy,
    train,
    user_of,
    zeros,
)

BUDGET = 3.0
AFFORDABLE = affordable_rounds(max_epsilon=BUDGET, delta=DELTA, release=NOISY)


def drive(ppsgd: PPSGD, rounds: int) -> None:
    """As whoever runs the rounds themselves does."""
    grid = nodes()
    w = zeros()
    for round_ in range(1, rounds + 1):
        messages = ppsgd.configure_train(round_, w, ConfigRecord(), grid)
        w, _ = ppsgd.aggregate_train(round_, grid.send_and_receive(messages))


# One training.


def test_start_runs_the_affordable_rounds_says_so_and_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert AFFORDABLE > 2
    limited = strategy(max_epsilon=BUDGET)
    with caplog.at_level(logging.WARNING):
        result = limited.start(nodes(), zeros(), num_rounds=1000)
    assert f"pays for {AFFORDABLE} of 1000 rounds" in caplog.text
    assert limited.ledger.rounds == limited.rounds_done == AFFORDABLE
    assert list(result.train_metrics_clientapp) == list(range(1, AFFORDABLE + 1))
    assert limited.ledger.epsilon() <= BUDGET
    stated = limited.privacy_data()["epsilon"]
    assert stated == pytest.approx(limited.ledger.epsilon())
    with pytest.raises(PrivacyBudgetExhausted):
        limited.configure_train(AFFORDABLE + 1, zeros(), ConfigRecord(), nodes())


def test_a_budget_for_no_round_returns_the_initial_w() -> None:
    poor = strategy(max_epsilon=0.01)
    result = poor.start(nodes(), zeros(), num_rounds=5)
    np.testing.assert_array_equal(flat(result.arrays), np.zeros(SIZE))
    assert poor.ledger.rounds == 0


def test_whoever_drives_the_rounds_gets_flowers_own_error() -> None:
    """Before anything is sent, and each time again; nothing more is charged."""
    limited = strategy(max_epsilon=BUDGET)
    drive(limited, AFFORDABLE)
    for _ in range(2):
        with pytest.raises(PrivacyBudgetExhausted, match="max_epsilon=3") as error:
            limited.configure_train(AFFORDABLE + 1, zeros(), ConfigRecord(), nodes())
        assert "\n" not in str(error.value)
    assert limited.ledger.rounds == AFFORDABLE


def test_the_budget_counts_over_restarts(tmp_path: Path) -> None:
    train(tmp_path, 2, max_epsilon=BUDGET)
    again = train(tmp_path, 1000, max_epsilon=BUDGET)
    assert again.ledger.rounds == again.rounds_done == AFFORDABLE


def test_local_learning_needs_no_budget() -> None:
    """α = 0 publishes nothing."""
    local = strategy(max_epsilon=0.01, steps=Steps.from_ratio(0.5, 0.0))
    local.start(nodes(), zeros(), num_rounds=5)
    assert (local.rounds_done, local.ledger.rounds, local.ledger.epsilon()) == (5, 0, 0.0)


# The ledger of a strategy.


def test_every_round_is_charged_once_with_its_release() -> None:
    plain = strategy()
    assert plain.ledger == Ledger(delta=DELTA)
    result = plain.start(nodes(), zeros(), num_rounds=4)
    assert plain.ledger == Ledger(delta=DELTA).record(NOISY, times=4)
    for round_, metrics in result.train_metrics_clientapp.items():
        spent = Ledger(delta=DELTA).record(NOISY, times=round_).epsilon()
        assert metrics["epsilon"] == pytest.approx(spent)


def test_a_round_in_which_nobody_is_drawn_is_charged_too() -> None:
    rare = Release(Poisson(USERS, 0.02), clip_norm=1.0, noise_multiplier=1.0)
    asked: list[int] = []

    def note(context: Context) -> Target:
        asked.append(user_of(context))
        return learner_for(context)

    empty = strategy(rare, insecure_seed=1)  # nobody is drawn with this one
    grid = InProcessGrid(client_app(note), USERS)
    w1 = empty.start(grid, zeros(), num_rounds=1).arrays
    w2 = empty.start(grid, zeros(), num_rounds=2).arrays
    assert not asked
    assert empty.ledger.rounds == 2
    assert np.all(flat(w1) != 0), "the noise is there"
    assert np.all(flat(w2) != flat(w1))


def test_a_strategy_knows_its_ledger_from_construction_on(tmp_path: Path) -> None:
    train(tmp_path, 4)
    again = strategy(checkpoint_dir=tmp_path)
    assert again.ledger == Ledger(delta=DELTA).record(NOISY, times=4)
    again.close()
    assert again.ledger.rounds == 4


# Several trainings under one budget.

QUIET = Release(Poisson(USERS, 1.0), clip_norm=1.0, noise_multiplier=40.0)


def fix_budget(directory: Path, *more: str) -> dict[str, Any]:
    """The settings of a training under this new budget."""
    made = ppsgd("budget", directory, "--epsilon", 0.5, "--delta", DELTA, *more)
    assert made.status == 0, made.err
    return {"release": QUIET, "budget_dir": directory}


@pytest.mark.parametrize("filter_", [[], ["--everyone"]])
def test_trainings_under_one_budget_stop_when_it_is_spent(
    tmp_path: Path, filter_: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """All of them together have at most the rounds that were affordable in one piece."""
    settings = fix_budget(tmp_path / "budget", *filter_)
    whole = affordable_rounds(max_epsilon=0.5, delta=DELTA, release=QUIET)
    first = train(tmp_path / "a", 10, **settings)
    with caplog.at_level(logging.WARNING):
        second = train(tmp_path / "b", 10**6, **settings)
    assert f"room for {second.ledger.rounds} of" in caplog.text
    third = train(tmp_path / "c", 3, **settings)
    assert first.ledger.rounds == 10
    assert third.ledger.rounds == 0
    together = 10 + second.ledger.rounds
    assert 0.7 * whole <= together <= whole
    for training in (first, second):
        assert training.privacy_data()["epsilon"] == 0.5
    with pytest.raises(PrivacyBudgetExhausted):
        third.configure_train(1, zeros(), ConfigRecord(), nodes())
    third.close()


def test_a_training_joins_before_its_first_round_and_never_leaves(tmp_path: Path) -> None:
    settings = fix_budget(tmp_path / "budget")
    train(tmp_path / "free", 1, release=QUIET)
    with pytest.raises(ValueError, match="before its first round"):
        strategy(checkpoint_dir=tmp_path / "free", **settings)
    train(tmp_path / "bound", 1, **settings)
    with pytest.raises(ValueError, match="set budget_dir"):
        strategy(QUIET, checkpoint_dir=tmp_path / "bound")
    other = fix_budget(tmp_path / "other")
    with pytest.raises(ValueError, match="not under the one in"):
        strategy(checkpoint_dir=tmp_path / "bound", **other)
    assert train(tmp_path / "bound", 2, **settings).ledger.rounds == 2


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"delta": 1e-6}, "delta"),
        ({"insecure_seed": 3}, "seed"),
        ({"release": Release(Poisson(300, 1.0), 1.0, 40.0, None, SecureSum(280, 2))}, "neighbours"),
    ],
)
def test_what_a_budget_cannot_cover_is_refused(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    settings = fix_budget(tmp_path / "budget")
    with pytest.raises(ValueError, match=name):
        strategy(**{**settings, **changes})


def test_there_must_be_a_budget(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no budget"):
        strategy(QUIET, budget_dir=tmp_path)
    assert not list(tmp_path.iterdir())
