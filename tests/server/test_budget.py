"""One budget for several trainings, fixed before the first: the filter never lets more through."""

import math
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.exception import PrivacyBudgetExhausted

from flwr_ppsgd import FixedSize, Ledger, Poisson, Release, affordable_rounds
from flwr_ppsgd.algorithm import Steps
from flwr_ppsgd.database import StoreError
from flwr_ppsgd.epsilon import gaussian
from flwr_ppsgd.server.account import ServerAccount
from flwr_ppsgd.server.budget import NAME, Allowance, Budget, new_budget
from flwr_ppsgd.server.reports import add_charges
from flwr_ppsgd.server.rounds import SumRequest
from flwr_ppsgd.server.sealed import NO_RECORD, home
from flwr_ppsgd.training import Training

DELTA = 1e-5
SAMPLED = Release(Poisson(1000, 0.01), 1.0, 2.0)
EVERYONE = Release(Poisson(1000, 1.0), 1.0, 20.0)
FIXED = Release(FixedSize(1000, 10), 1.0, 20.0)


def account(directory: Path | None, budget: Path | None, **changes: Any) -> ServerAccount:
    settings: dict[str, Any] = {"release": SAMPLED, "steps": Steps(0.1, 0.1), "delta": DELTA}
    places = {"checkpoint_dir": directory, "budget_dir": budget}
    return ServerAccount(Training(**{**settings, **places, **changes}))


def shown(directory: Path) -> Budget:
    return Budget(directory, read_only=True)


def asked(of: ServerAccount, round_: int) -> SumRequest:
    return SumRequest("gradient", round_, of.training.release, 3)


def one_round(of: ServerAccount, round_: int) -> None:
    of.reopen()
    of.check(asked(of, round_))
    of.charge(asked(of, round_))
    of.rounds_done = round_


@pytest.mark.parametrize("filter_", ["rdp", "gaussian"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 50.0])
def test_what_the_filter_lets_through_is_within_the_budget(filter_: Any, epsilon: float) -> None:
    """The same releases, priced in one piece: a valid filter never allows more than that."""
    allowance = Allowance.of(epsilon, DELTA, filter_)
    dice = random.Random(1)
    for _ in range(5):
        spent = 0.0
        ledger = Ledger(DELTA)
        while True:
            z = dice.uniform(2.0, 40.0) / min(1.0, epsilon)
            rate = 1.0 if filter_ == "gaussian" else dice.choice([1.0, 0.3, 0.05])
            release = Release(Poisson(1000, rate), 1.0, z)
            times = dice.randrange(1, 60)
            spent += times * allowance.cost(release)
            if spent > allowance.limit:
                break
            ledger = ledger.record(release, times)
        by_rdp = ledger.epsilon(method="rdp")
        exact = ledger.quick_epsilon() if filter_ == "gaussian" else by_rdp
        assert exact <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0, 20.0])
def test_the_gaussian_filter_is_exact(epsilon: float) -> None:
    """Without sampling all rounds of the budget fit, as if they had been planned in advance."""
    allowance = Allowance.of(epsilon, DELTA, "gaussian")
    release = Release(Poisson(100, 1.0), 1.0, 30.0 / epsilon)
    planned = affordable_rounds(max_epsilon=epsilon, delta=DELTA, release=release)
    allowed = math.floor(allowance.limit / allowance.cost(release))
    assert planned - 1 <= allowed <= planned


@pytest.mark.parametrize("release", [EVERYONE, SAMPLED, FIXED])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_the_rdp_filter_allows_nearly_as_many_rounds_as_an_rdp_plan(
    release: Release, epsilon: float
) -> None:
    """One order, fixed in advance, instead of the best one for these rounds."""
    allowance = Allowance.of(epsilon, DELTA)
    planned = affordable_rounds(max_epsilon=epsilon, delta=DELTA, release=release, method="rdp")
    allowed = math.floor(allowance.limit / allowance.cost(release))
    assert 0.98 * planned - 1 <= allowed <= planned


def test_replace_one_neighbours_under_a_budget_cost_more() -> None:
    exact = Allowance.of(1.0, DELTA, "gaussian")
    sigma = 1 / math.sqrt(exact.limit)
    assert gaussian(sigma, DELTA) == pytest.approx(1.0, rel=1e-6)
    assert exact.epsilon_replace_one() == pytest.approx(gaussian(sigma / 2, DELTA))
    by_rdp = Allowance.of(1.0, DELTA).epsilon_replace_one()
    assert 2.0 < by_rdp < 3.0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ((0.0, DELTA), "epsilon must be positive and finite, got 0.0"),
        ((math.inf, DELTA), "epsilon must be positive and finite, got inf"),
        ((1.0, 0.0), r"delta must be in \(0, 1\), got 0.0"),
        ((1e-6, 1e-12), "epsilon is too small for an RDP filter"),
        ((1.0, DELTA, "rpd"), "did you mean 'rdp'"),
    ],
)
def test_a_budget_that_is_none_is_refused(
    tmp_path: Path, settings: tuple[Any, ...], names: str
) -> None:
    with pytest.raises(ValueError, match=names):
        new_budget(tmp_path / "budget", *settings)
    assert not (tmp_path / "budget").exists()


def test_a_charge_that_another_training_has_made_impossible_is_not_released(tmp_path: Path) -> None:
    new_budget(tmp_path / "budget", 1.0, DELTA)
    first = account(tmp_path / "a", tmp_path / "budget")
    first.check(asked(first, 1))
    other = Budget(tmp_path / "budget")
    other.catch_up(7, {(SAMPLED, False): other.affords(SAMPLED)})
    with pytest.raises(PrivacyBudgetExhausted):
        first.charge(asked(first, 1))
    assert first.ledger.rounds == 0


def test_a_gaussian_budget_refuses_sampled_users(tmp_path: Path) -> None:
    new_budget(tmp_path, 1.0, DELTA, "gaussian")
    with pytest.raises(ValueError, match=r"no price for sampled users, got rate=0.01"):
        account(None, tmp_path)
    one_round(account(None, tmp_path, release=EVERYONE), 1)


def test_without_noise_nothing_fits(tmp_path: Path) -> None:
    new_budget(tmp_path, 1.0, DELTA)
    of = account(None, tmp_path, release=Release(Poisson(10, 1.0), 1.0, 0.0))
    assert of.plan(3, 0) == 0
    with pytest.raises(PrivacyBudgetExhausted):
        of.check(asked(of, 1))


def test_charges_that_only_the_training_shows_are_brought_into_the_budget(tmp_path: Path) -> None:
    new_budget(tmp_path / "budget", 1.0, DELTA)
    of = account(tmp_path / "a", tmp_path / "budget")
    one_round(of, 1)
    of.close()
    add_charges(tmp_path / "a", 2, "known from elsewhere")
    assert shown(tmp_path / "budget").tally == {(of.training_id, 0, False): 3}
    again = account(tmp_path / "a", tmp_path / "budget")
    assert again.ledger.rounds == shown(tmp_path / "budget").charge_count == 3


@pytest.mark.parametrize("gone", ["removed", "emptied", "replaced"])
def test_a_budget_that_was_begun_anew_is_refused(tmp_path: Path, gone: str) -> None:
    new_budget(tmp_path / "other", 9.0, DELTA)
    new_budget(tmp_path / "a", 1.0, DELTA)
    Budget(tmp_path / "a").charge(1, 1, SAMPLED)
    path = tmp_path / "a" / NAME
    path.unlink()
    if gone == "emptied":
        path.touch()
    if gone == "replaced":
        shutil.copy(tmp_path / "other" / NAME, path)
    for attempt in (new_budget, lambda directory, *_: Budget(directory)):
        with pytest.raises(StoreError, match=r"no budget in|knows of 1 charges of the budget"):
            attempt(tmp_path / "a", 2.0, DELTA)


def test_charges_that_are_added_by_hand_cost_as_much_as_any(tmp_path: Path) -> None:
    new_budget(tmp_path / "a", 1.0, DELTA)
    add_charges(tmp_path / "a", 1, "known from elsewhere")
    assert shown(tmp_path / "a").cost_of_charges() == math.inf, "no release is known"
    new_budget(tmp_path / "b", 1.0, DELTA)
    budget = Budget(tmp_path / "b")
    for release in (SAMPLED, EVERYONE):
        budget.charge(1, 1, release)
    add_charges(tmp_path / "b", 1, "known from elsewhere")
    costs = [budget.allowance.cost(each) for each in (SAMPLED, EVERYONE)]
    assert shown(tmp_path / "b").cost_of_charges() == pytest.approx(sum(costs) + max(costs))


def test_a_budget_without_its_record_says_so(tmp_path: Path) -> None:
    new_budget(tmp_path, 1.0, DELTA)
    Budget(tmp_path).charge(1, 1, SAMPLED)
    shutil.rmtree(home())
    of = account(None, tmp_path)
    assert NO_RECORD[1:] in of.promise().statement()
    of.close()
    assert NO_RECORD[1:] in account(None, tmp_path).promise().statement()


def test_trainings_that_run_at_once_lose_no_charge(tmp_path: Path) -> None:
    new_budget(tmp_path, 5.0, DELTA)

    def train(training: int) -> None:
        budget = Budget(tmp_path)
        for round_ in range(1, 16):
            budget.charge(training, round_, EVERYONE)

    threads = [threading.Thread(target=train, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shown(tmp_path).tally == {(training, 0, False): 15 for training in range(4)}


def test_an_account_without_a_store_opens_its_budget_again(tmp_path: Path) -> None:
    new_budget(tmp_path, 1.0, DELTA)
    of = account(None, tmp_path)
    one_round(of, 1)
    of.close()
    one_round(of, 2)
    assert (of.rounds_done, of.ledger.rounds) == (2, 2)
    assert shown(tmp_path).charge_count == 2
