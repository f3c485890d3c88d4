"""``ppsgd plan`` for the recipe: numbers against the functions they come from, and words."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd.lab.recipe_plan import RecipeQuestion, in_words, is_asked, make, missing
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.recipe import noise_alone, recipe
from tests.lab.test_plan import ppsgd  # noqa: F401 - a fixture

FLAT: dict[str, Any] = {"population": 600, "epsilon": 2.0, "delta": 1e-5}
NUMBERS = [f"--{key}={value}" for key, value in FLAT.items()]


def question(**changes: Any) -> RecipeQuestion:
    return RecipeQuestion.read(FLAT | {key.replace("_", "-"): v for key, v in changes.items()})


@pytest.mark.parametrize(
    "changes", [{}, {"rounds": 3}, {"rate": 0.1}, {"population": 60}, {"task": "regression"}]
)
def test_it_plans_what_the_recipe_runs(changes: dict[str, Any]) -> None:
    """The same z and rounds, and the ε of all of it under both relations."""
    plan = make(question(**changes))
    expected = recipe(**{"task": "classification"} | FLAT | changes)
    assert plan.noise.rounds == expected.rounds
    assert plan.noise_multiplier == expected.release.noise_multiplier
    ledger = Ledger(1e-5)
    for name, release in expected.before.items():
        assert plan.before[name] == release.noise_multiplier
        ledger = ledger.record(release)
    ledger = ledger.record(expected.release, expected.rounds)
    assert plan.epsilon == ledger.epsilon() <= 2.0
    assert plan.epsilon_replace_one == ledger.epsilon("replace-one") > plan.epsilon


def test_noise_in_a_prediction_by_hand() -> None:
    """About σ₁·T/N of the size C: a little more, for the 5 % that the size takes."""
    plan = make(question(population=6000))
    sigma = noise_alone(2.0, 1e-5)
    assert plan.noise.rounds == 8
    assert plan.noise.in_prediction == pytest.approx(sigma * 8 / 6000 / math.sqrt(0.95))


def test_more_users_or_epsilon_are_plans_of_their_own() -> None:
    plan = make(question())
    assert plan.with_more_users == make(question(population=1200)).noise
    assert plan.with_more_epsilon == make(question(epsilon=4.0)).noise


def test_words_name_what_public_numbers_do_not_say() -> None:
    words = in_words(question(), make(question()))
    assert "600 users, everyone in each of 3 rounds" in words
    assert "everyone, once: size (z = " in words
    assert "whether sharing gains, does not follow from public numbers" in words
    assert "replace-one" in words
    assert "αQ" not in words
    assert "mostly keep to their own models" not in words
    sampled = question(rate=0.1)
    assert "each with chance 0.1 (about 60) in each of 40" in in_words(sampled, make(sampled))
    few = question(population=5)
    assert "mostly keep to their own models" in in_words(few, make(few))
    careless = question(delta=1e-3)
    assert "caution" in in_words(careless, make(careless))


def test_a_secure_sum_is_planned_too() -> None:
    secure = question(secure_honest=500, secure_colluding=10)
    plan = make(secure)
    assert plan.secure is not None
    assert plan.secure.clients == 600
    noise = math.sqrt(600 / 500) * plan.noise_multiplier / 600
    assert plan.noise.in_prediction == pytest.approx(noise * math.sqrt(plan.noise.rounds))
    assert "may drop out" in in_words(secure, plan)


@pytest.mark.parametrize(
    ("flat", "given", "automatic"),
    [
        ({}, {}, True),
        ({"rate": 0.1, "rounds": 20}, {"rate": 0.1}, True),
        ({"clip-norm": 1.0}, {}, False),
        ({"method": "auto", "batch-size": 5}, {}, True),
        ({"method": "auto"}, {"batch_size": 5}, False),
        ({"method": "paper"}, {}, False),
        ({"noise-multiplier": 3.0}, {}, False),
    ],
)
def test_options_of_the_paper_ask_for_its_plan(
    flat: dict[str, Any], given: dict[str, Any], automatic: bool
) -> None:
    assert is_asked(flat, given) == automatic


def test_the_mean_size_of_a_cohort_is_a_rate() -> None:
    assert question(cohort_mean=60).rate == 0.1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"population": 0}, "population must be"),
    ({"epsilon": math.inf}, "epsilon must be positive and finite"),
    ({"epsilon": math.nan}, "epsilon must be positive and finite"),
    ({"epsilon": -1.0}, "epsilon must be positive and finite"),
    ({"delta": 0.0}, "delta must be"),
    ({"rate": 1.5}, "rate must be"),
    ({"rounds": 0}, "rounds must be"),
    ({"task": "ranking"}, "task must be"),
    ({"epsilon": 1e-9}, "delta = 1e-05 alone pays for all 2 rounds"),
    ({"secure-colluding": 3}, "needs secure-honest too"),
    ({"population": "many"}, "population must be of type int"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_numbers_without_meaning_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(RecipeQuestion.read(FLAT | change))


def test_what_is_missing_is_asked_for(ppsgd: Any) -> None:  # noqa: F811
    assert len(missing({})) == 3
    status, out, err = ppsgd("--population", "1000")
    assert (status, out) == (2, "")
    assert [line.split()[0] for line in err.splitlines()[1:]] == ["--delta", "--epsilon"]


def test_the_command(ppsgd: Any) -> None:  # noqa: F811
    status, out, err = ppsgd(*NUMBERS)
    assert (status, err) == (0, "")
    assert "asked before" in out
    status, out, _ = ppsgd(*NUMBERS, "--json", "--rate", "0.5")
    data = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert status == 0
    assert (data["method"], data["noise"]["rounds"], data["rate"]) == ("auto", 40, 0.5)
    assert data["epsilon"] <= 2.0 < data["epsilon_replace_one"]


def test_the_command_reads_a_file_of_the_recipe(ppsgd: Any) -> None:  # noqa: F811
    Path("auto.toml").write_text('method = "auto"\npopulation = 600\nepsilon = 2.0\ndelta = 1e-5\n')
    status, out, _ = ppsgd("auto.toml", "--epsilon", "1")
    assert status == 0
    assert "1 zero-out" in out
