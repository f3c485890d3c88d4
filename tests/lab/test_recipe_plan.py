"""``ppsgd plan`` for the recipe: numbers against the functions they come from, and words."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd.lab.recipe_plan import RecipeQuestion, in_words, is_asked, make, missing
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.recipe import least_voters, recipe
from tests.lab.test_plan import ppsgd  # noqa: F401 - a fixture

FLAT: dict[str, Any] = {"population": 600, "epsilon": 2.0, "delta": 1e-5, "dimension": 400}
NUMBERS = [f"--{key}={value}" for key, value in FLAT.items()]


def question(**changes: Any) -> RecipeQuestion:
    return RecipeQuestion.read(FLAT | {key.replace("_", "-"): v for key, v in changes.items()})


@pytest.mark.parametrize("changes", [{}, {"rounds": 20}, {"rate": 0.1}, {"population": 60}])
def test_it_plans_what_the_recipe_runs(changes: dict[str, Any]) -> None:
    """The same z, vote and rounds, and the ε of all of it under both relations."""
    plan = make(question(**changes))
    given = {key: value for key, value in (FLAT | changes).items() if key != "dimension"}
    expected = recipe(**given)
    assert plan.rounds == expected.rounds == changes.get("rounds", 50)
    assert plan.noise_multiplier == expected.release.noise_multiplier
    ledger = Ledger(1e-5)
    if expected.vote is None:
        assert plan.vote.noise_multiplier is None
    else:
        assert plan.vote.noise_multiplier == expected.vote.release.noise_multiplier
        ledger = ledger.record(expected.vote.release)
    ledger = ledger.record(expected.release, expected.rounds)
    assert plan.epsilon == ledger.epsilon() <= 2.0
    assert plan.epsilon_replace_one == ledger.epsilon("replace-one") > plan.epsilon


def test_noise_and_signal_by_hand() -> None:
    """Everyone: σ = z/N, and all users agreeing say √T·N/(z√d) times as much as the noise."""
    plan = make(question(rounds=25))
    assert plan.noise_std == pytest.approx(plan.noise_multiplier / 600)
    assert plan.signal_to_noise == pytest.approx(5 * 600 / (plan.noise_multiplier * 20))


def test_more_rounds_buy_no_signal() -> None:
    """At rate 1, z grows as √T: only the budget counts."""
    few = make(question(rounds=20)).signal_to_noise
    assert few == pytest.approx(make(question(rounds=80)).signal_to_noise, rel=1e-6)


def test_the_population_and_the_parameters_it_would_take_reach_it() -> None:
    plan = make(question(signal_to_noise=20.0))
    assert plan.signal_to_noise is not None
    assert plan.signal_to_noise < 20.0
    assert plan.population_needed is not None
    more = make(question(population=plan.population_needed))
    assert more.signal_to_noise == pytest.approx(20.0, rel=0.03)  # a vote may cost more or less
    fewer = make(question(dimension=plan.dimension_carried)).signal_to_noise
    one_more = make(question(dimension=plan.dimension_carried + 1)).signal_to_noise
    assert fewer is not None
    assert one_more is not None
    assert fewer >= 20.0 > one_more


def test_users_who_agree_less_say_less() -> None:
    all_agree = make(question())
    half = make(question(agreement=0.5))
    assert half.signal_to_noise == pytest.approx((all_agree.signal_to_noise or 0) / 2)
    assert half.dimension_carried == pytest.approx(all_agree.dimension_carried / 4, abs=1)
    assert "at an agreement of 0.5" in in_words(question(agreement=0.5), half)


def test_the_least_population_with_a_vote() -> None:
    least = make(question(population=20)).vote.least_population
    assert least == least_voters(2.0, 1e-5)
    with_vote = make(question(population=least)).vote
    assert with_vote.share == pytest.approx(0.05, rel=0.02)
    without = question(population=least - 1)
    assert make(without).vote.noise_multiplier is None
    words = in_words(without, make(without))
    assert (
        f"none: its noise would exceed a 16th of the users for 5% of the budget; it takes {least:,}"
        in words
    )


def test_a_large_population_pays_one_percent_for_its_vote() -> None:
    assert make(question(population=10**6)).vote.share == pytest.approx(0.01, rel=1e-3)


def test_noise_as_given() -> None:
    flat = {key: value for key, value in FLAT.items() if key != "epsilon"}
    plan = make(RecipeQuestion.read({**flat, "noise-multiplier": 30.0}))
    assert (plan.noise_multiplier, plan.vote.noise_multiplier) == (30.0, 30.0)
    assert plan.vote.share == pytest.approx(1 / 51, rel=1e-3)
    assert plan.vote.least_population == 480


def test_without_a_dimension_it_says_what_cannot_be_known() -> None:
    asked = RecipeQuestion.read({key: FLAT[key] for key in ("population", "epsilon", "delta")})
    plan = make(asked)
    assert (plan.signal_to_noise, plan.population_needed) == (None, None)
    words = in_words(asked, plan)
    assert "not known without --dimension" in words
    assert f"this population carries at most {plan.dimension_carried:,} shared" in words


def test_words_name_what_public_numbers_do_not_say() -> None:
    words = in_words(question(), make(question()))
    assert "600 users, everyone in each of 50 rounds, d = 400 shared parameters" in words
    assert "whether sharing gains, does not follow from public numbers" in words
    assert "replace-one" in words
    assert "αQ" not in words
    sampled = question(rate=0.1)
    assert "each with chance 0.1 (about 60) in each" in in_words(sampled, make(sampled))
    hopeless = question(dimension=10**7)
    assert "more noise than users can say" in in_words(hopeless, make(hopeless))
    careless = question(delta=1e-3)
    assert "caution" in in_words(careless, make(careless))


def test_a_secure_sum_is_planned_too() -> None:
    secure = question(secure_honest=500, secure_colluding=10)
    plan = make(secure)
    assert plan.secure is not None
    assert plan.secure.clients == 600
    assert plan.noise_std == pytest.approx(math.sqrt(600 / 500) * plan.noise_multiplier / 600)
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
    ({"dimension": 0}, "dimension must be"),
    ({"epsilon": math.inf}, "epsilon must be positive and finite"),
    ({"epsilon": math.nan}, "epsilon must be positive and finite"),
    ({"epsilon": -1.0}, "epsilon must be positive and finite"),
    ({"delta": 0.0}, "delta must be"),
    ({"rate": 1.5}, "rate must be"),
    ({"rounds": 0}, "rounds must be"),
    ({"agreement": 0.0}, r"agreement must be in \(0, 1\]"),
    ({"signal-to-noise": math.inf}, "signal-to-noise must be positive"),
    ({"noise-multiplier": 3.0}, "give either epsilon or noise_multiplier"),
    ({"epsilon": 1e-9}, "delta = 1e-05 alone pays for all 50 rounds"),
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
    assert "vote on the rate" in out
    status, out, _ = ppsgd(*NUMBERS, "--json", "--rate", "0.5")
    data = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert status == 0
    assert (data["method"], data["rounds"], data["rate"]) == ("auto", 50, 0.5)
    assert data["epsilon"] <= 2.0 < data["epsilon_replace_one"]


def test_the_command_reads_a_file_of_the_recipe(ppsgd: Any) -> None:  # noqa: F811
    Path("auto.toml").write_text('method = "auto"\npopulation = 600\nepsilon = 2.0\ndelta = 1e-5\n')
    status, out, _ = ppsgd("auto.toml", "--epsilon", "1")
    assert status == 0
    assert "1 zero-out" in out


def test_an_option_that_would_not_be_heeded_is_refused(ppsgd: Any) -> None:  # noqa: F811
    status, _, err = ppsgd(*NUMBERS, "--clip-norm", "1", "--agreement", "0.5")
    assert status == 2
    assert err.startswith("ppsgd: --agreement is for the recipe")
