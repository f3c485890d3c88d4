"""``ppsgd plan``: its numbers against the functions they come from, its words, its refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.plan import Plan
from flwr_ppsgd.recipe import noise_alone, recipe
from tests.contract.command import ppsgd

FLAT: dict[str, Any] = {"population": 600, "epsilon": 2.0, "delta": 1e-5}
NUMBERS = [f"--{key}={value}" for key, value in FLAT.items()]


def plan_for(**changes: Any) -> Plan:
    flat = {key.replace("_", "-"): value for key, value in changes.items()}
    return Plan.read(FLAT | flat)


@pytest.mark.parametrize("changes", [{}, {"rounds": 3}, {"rate": 0.1}, {"population": 60}])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_it_plans_what_the_recipe_runs(changes: dict[str, Any], task: str) -> None:
    """The same z and rounds for either task, and the ε of all of it under both relations."""
    plan = plan_for(**changes)
    expected = recipe(**{"task": task} | FLAT | changes)
    assert plan.recipe.rounds == expected.rounds
    assert plan.recipe.release == expected.release
    assert list(plan.recipe.before.values()) == list(expected.before.values())
    ledger = Ledger(1e-5).record_all((release, 1) for release in expected.before.values())
    ledger = ledger.record(expected.release, expected.rounds)
    data = plan.as_data()
    assert data["epsilon"] == ledger.epsilon() <= 2.0
    assert data["epsilon_replace_one"] == ledger.epsilon("replace-one") > data["epsilon"]


def test_noise_in_a_prediction_by_hand() -> None:
    """About σ₁·T/N of the size C: a little more, for the 5 % that the size takes."""
    plan = plan_for(population=6000)
    sigma = noise_alone(2.0, 1e-5)
    assert plan.recipe.rounds == 8
    assert plan.recipe.noise_in_prediction == pytest.approx(sigma * 8 / 6000 / math.sqrt(0.95))


def test_signal_to_noise_by_hand() -> None:
    """(C/√d)/(zC/N): N/(z·√d)."""
    assert plan_for().signal_to_noise is None
    plan = plan_for(dimension=49)
    assert plan.signal_to_noise == pytest.approx(600 / plan.recipe.release.noise_multiplier / 7)


def test_more_users_or_epsilon_are_plans_of_their_own() -> None:
    others = {"users": plan_for(population=1200).recipe, "epsilon": plan_for(epsilon=4.0).recipe}
    assert plan_for().alternatives() == others


def test_words_name_what_public_numbers_do_not_say() -> None:
    words = plan_for().text()
    assert "600 users, everyone in each of 3 rounds" in words
    assert "everyone, once: one number (z = " in words
    assert "whether sharing gains, does not follow from public numbers" in words
    assert "replace-one" in words
    assert "mostly keep to their own models" not in words
    assert "signal to noise" not in words
    assert "for d = 7,840" in plan_for(dimension=7840).text()
    assert "each with chance 0.1 (about 60) in each of 40" in plan_for(rate=0.1).text()
    assert "mostly keep to their own models" in plan_for(population=5).text()
    assert "caution" in plan_for(delta=1e-3).text()


def test_a_secure_sum_is_planned_too() -> None:
    plan = plan_for(secure_honest=500, secure_colluding=10)
    assert plan.as_data()["secure"]["clients"] == 600
    found = plan.recipe
    noise = math.sqrt(600 / 500) * found.release.noise_multiplier / 600
    assert found.noise_in_prediction == pytest.approx(noise * math.sqrt(found.rounds))
    assert "may drop out" in plan.text()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"population": 0}, "population must be"),
    ({"epsilon": math.inf}, "epsilon must be positive and finite"),
    ({"epsilon": math.nan}, "epsilon must be positive and finite"),
    ({"epsilon": -1.0}, "epsilon must be positive and finite"),
    ({"delta": 0.0}, "delta must be"),
    ({"dimension": 0}, "dimension must be"),
    ({"rate": 1.5}, "rate must be"),
    ({"rounds": 0}, "rounds must be"),
    ({"epsilon": 1e-9}, "delta = 1e-05 alone pays for all 2 rounds"),
    ({"secure-colluding": 3}, "needs secure-honest too"),
    ({"population": "many"}, "population must be of type int"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_numbers_without_meaning_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.read(FLAT | change).text()


def test_the_command_for_programs() -> None:
    """Valid JSON, also where the ε of replace-one is infinite."""
    for more in ((), ("--rate", "0.5"), ("--epsilon", "200")):
        ended = ppsgd("plan", *NUMBERS, "--json", *more)
        assert ended.status == 0, ended.err
        json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    data = json.loads(ppsgd("plan", *NUMBERS, "--json", "--rate", "0.5").out)
    assert (data["rounds"], data["rate"]) == (40, 0.5)
    assert data["epsilon"] <= 2.0 < data["epsilon_replace_one"]


def test_a_file_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    text = 'method = "auto"\npopulation = 600\nepsilon = 2.0\ndelta = 1e-5\n'
    (tmp_path / "auto.toml").write_text(text)
    ended = ppsgd("plan", "auto.toml", "--epsilon", "1", where=tmp_path)
    assert ended.status == 0
    assert "1 zero-out" in ended.out
