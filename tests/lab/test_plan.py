"""``ppsgd plan``: its numbers against the functions they come from, and how it asks for what is
missing."""

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flwr_ppsgd import FixedSize, Ledger, Poisson, Release, calibrate_noise, cli
from flwr_ppsgd.lab.plan import ASKED, EASED, Question, ask, gather, in_words, make, missing
from flwr_ppsgd.lab.theory import Minimiser, favours_local, theorem_b_4, threshold_samples

FLAT: dict[str, Any] = {
    "population": 200,
    "rate": 0.1,
    "rounds": 50,
    "delta": 1e-5,
    "epsilon": 2.0,
    "dimension": 40,
    "batch-size": 5,
}
TOML = """
population = 200
rate = 0.1
rounds = 50
delta = 1e-5
noise-multiplier = 3.0
clip-norm = 2.0
features = 40
batch-size = 5
step = 0.1
alpha-q = 0.3
"""


def plan_for(**changes: Any) -> Any:
    return make(
        Question.read(
            gather(None, {**FLAT, **{k.replace("_", "-"): v for k, v in changes.items()}})
        )
    )


@pytest.fixture(scope="module")
def plan() -> Any:
    return plan_for()


@pytest.fixture
def ppsgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(TOML)
    monkeypatch.setattr(sys, "stdin", open("/dev/null", encoding="utf-8"))  # noqa: SIM115
    level = logging.getLogger("flwr").level

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ppsgd", "plan", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    yield call
    sys.stdin.close()
    logging.getLogger("flwr").setLevel(level)


def test_noise_and_epsilon_are_the_accountants(plan: Any) -> None:
    """z for the target by PLD, less than RDP's; ε under both relations at that z."""
    cohort = Poisson(200, 0.1)
    ledger = Ledger(1e-5).record(Release(cohort, 1.0, plan.price.noise_multiplier), 50)
    assert plan.price.noise_multiplier == calibrate_noise(
        epsilon=2.0, delta=1e-5, cohort=cohort, rounds=50
    )
    assert (
        plan.price.noise_multiplier
        < plan.price.noise_multiplier_rdp
        < 1.3 * plan.price.noise_multiplier
    )
    assert ledger.epsilon() == plan.price.epsilon <= 2.0 < plan.price.epsilon_rdp
    assert plan.price.epsilon_replace_one == ledger.epsilon("replace-one")


def test_fixed_size_cohorts_are_charged_without_amplification(plan: Any) -> None:
    fixed = calibrate_noise(epsilon=2.0, delta=1e-5, cohort=FixedSize(200, 20), rounds=50)
    assert plan.price.noise_multiplier_fixed_size == fixed > 3 * plan.price.noise_multiplier_poisson
    other_way = plan_for(rate=None, cohort_size=20)
    assert other_way.price.noise_multiplier == fixed
    assert other_way.price.noise_multiplier_poisson == plan.price.noise_multiplier


def test_noise_per_coordinate_by_hand() -> None:
    """z = 3, C = 2, D = 20: σ_ζ = .3; C/√40 = .3162 over it."""
    plan = plan_for(epsilon=None, noise_multiplier=3.0, clip_norm=2.0)
    assert plan.price.noise_std == pytest.approx(0.3)
    assert plan.price.signal_to_noise == pytest.approx(2 / math.sqrt(40) / 0.3)


def test_with_noise_and_a_budget_the_rounds_that_it_pays_for_are_counted() -> None:
    plan = plan_for(rate=1.0, noise_multiplier=20.0)
    ledger, release = Ledger(1e-5), Release(Poisson(200, 1.0), 1.0, 20.0)
    paid = plan.price.affordable_rounds
    assert (
        ledger.record(release, paid).epsilon() <= 2.0 < ledger.record(release, paid + 1).epsilon()
    )


def test_passes_become_rounds() -> None:
    """2 passes over 100 samples, 5 at a time, in every tenth round: 400 rounds."""
    assert Question.read({**FLAT, "rounds": 7}).planned_rounds() == 7
    flat = {key: value for key, value in FLAT.items() if key != "rounds"} | {
        "passes": 2,
        "samples-per-user": 100,
    }
    assert Question.read(flat).planned_rounds() == 400


def test_the_threshold_without_sampling_is_lemma_4_6_with_the_accountants_constant() -> None:
    """q = 1, m = 1: n* by the noise in use is the lemma's, with the c for which Theorem 4.1 gives
    that noise."""
    plan = plan_for(rate=1.0, batch_size=1, gradient_std=0.5, clip_norm=2.0)
    lemma = threshold_samples(
        population=200,
        sigma=0.5,
        dimension=40,
        gradient_bound=2.0,
        epsilon=plan.price.epsilon,
        delta=1e-5,
        constant=plan.price.constant,
    )
    assert plan.advice.threshold_samples == pytest.approx(lemma)


@pytest.mark.parametrize("sigma", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_the_side_follows_from_the_threshold(rate: float, sigma: float) -> None:
    """n ≥ n* is the same statement as the inequality in σ_ζ, and as σ below its critical value."""
    plan = plan_for(rate=rate, gradient_std=sigma)
    local = favours_local(
        population=200,
        rate=rate,
        batch_size=5,
        dimension=40,
        sigma=sigma,
        noise_std=plan.price.noise_std,
    )
    assert (plan.advice.favours == "local") is local
    assert (plan.advice.samples_used >= plan.advice.threshold_samples) is local
    assert (sigma <= plan.advice.critical_gradient_std) is local


def test_the_advice_is_the_smallest_bound_of_theorem_b_4(plan: Any) -> None:
    """With the assumed σ = C = 1, ‖v‖ = 1 and L = 2, eased; the choice for L itself stands beside
    it."""
    theorem = theorem_b_4(
        population=200,
        rate=0.1,
        rounds=50,
        dimension=40,
        smoothness=2.0,
        variance_w=0.2,
        variance_theta=0.2,
        noise_std=plan.price.noise_std,
    )
    advised, strict = (
        choose.best(Minimiser.additive_norms(200, 1.0))
        for choose in (theorem.eased(EASED), theorem)
    )
    assert plan.advice.alpha_q == advised.alpha * 20
    assert (plan.advice.step_shared, plan.advice.step_personal) == (
        advised.steps.shared,
        advised.steps.personal,
    )
    assert plan.advice.bound_alpha_q == strict.alpha * 20
    assert (
        min(bound for _, bound in plan.advice.bounds)
        == strict.total
        == pytest.approx(plan.advice.bound_bias + plan.advice.bound_deviation)
    )


@pytest.mark.parametrize(
    ("sigma", "distance", "end"), [(0.03, 3.0, ("local", 0.0)), (10.0, 100.0, ("global", math.inf))]
)
def test_the_advice_follows_the_noise_where_the_bias_of_the_bound_is_larger(
    sigma: float, distance: float, end: tuple[str, float]
) -> None:
    """For L itself the bound takes αQ = 1 on both sides of Lemma 4.6's threshold; the advice takes
    the right end."""
    plan = plan_for(rate=1.0, gradient_std=sigma, distance=distance)
    assert plan.advice.bound_bias > plan.advice.bound_deviation
    assert plan.advice.bound_alpha_q == 1.0
    assert (plan.advice.favours, plan.advice.alpha_q) == end


def test_a_bound_above_the_untrained_risk_is_said_to_say_little() -> None:
    """f(0) − f* ≤ L‖v‖²/4: by smoothness, from the split w = θ = v/2. L = 2, ‖v‖ = 1 gives ½."""
    question = Question.read({**FLAT, "dimension": 10**6, "rate": 0.05})
    vague = make(question)
    assert vague.advice.untrained == 0.5
    assert "caution: not training at all costs at most 0.5" in in_words(question, vague)
    sharp = Question.read({**FLAT, "rate": 1.0, "rounds": 10000, "gradient-std": 0.01})
    assert "caution: not training" not in in_words(sharp, make(sharp))


def test_what_is_given_is_not_assumed(plan: Any) -> None:
    given = plan_for(gradient_std=0.5, smoothness=1.0, distance=3.0, spread=0.1)
    assert len(plan.advice.assumptions) == 6
    assert len(given.advice.assumptions) == 2
    assert dict(given.advice.bounds)[math.inf] == math.inf


def test_the_file_is_taken_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    flat = gather(tmp_path / "a.toml", {"epsilon": 1.0, "population": 300, "rate": None})
    question = Question.read(flat)
    assert (question.population, question.rate, question.dimension, question.clip_norm) == (
        300,
        0.1,
        40,
        2.0,
    )
    assert (question.epsilon, question.noise_multiplier) == (1.0, None)


@pytest.mark.parametrize("key", sorted(ASKED.keys() - {"samples-per-user"}))
def test_what_is_missing_is_asked_for_in_one_line(key: str) -> None:
    flat = {name: value for name, value in FLAT.items() if name != key}
    assert missing(flat) == [ASKED[key]]
    assert ask(flat, lambda _: str(FLAT[key])) == FLAT
    with pytest.raises(ValueError, match=f"a plan needs more numbers:\n  --{key} "):
        Question.read(flat)


def test_passes_ask_for_the_samples_that_make_them_rounds() -> None:
    flat = {**{name: value for name, value in FLAT.items() if name != "rounds"}, "passes": 2.0}
    assert missing(flat) == [ASKED["samples-per-user"]]
    assert Question.read(ask(flat, lambda _: "100")).planned_rounds() == 400


def test_an_answer_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="population must be a number"):
        ask({}, lambda _: "many people")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"population": 0}, "population must be"),
        ({"rate": 2.0}, "rate must be"),
        ({"delta": 0.0}, "delta must be"),
        ({"epsilon": -1.0}, "epsilon must be"),
        ({"dimension": 0}, "dimension must be at least 1"),
        ({"smoothness": math.nan}, "smoothness must be positive"),
        ({"spread": -1.0}, "spread must not be negative"),
        ({"population": "many"}, "population must be of type int"),
        ({"epsilon": None, "noise-multiplier": 0.0}, "noise-multiplier must be above 0"),
        ({"epsilon": 1e-9}, "delta = 1e-05 alone pays for all 50 rounds"),
        ({"epsilon": None, "noise-multiplier": 1e5}, "delta = 1e-05 alone pays for all 50 rounds"),
        ({"cohort-size": 20}, "rate and cohort-size are both given"),
        ({"passes": 2.0, "samples-per-user": 10.0}, "rounds and passes are both given"),
    ],
)
def test_numbers_without_meaning_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Question.read(gather(None, {**FLAT, **change})))


def test_words_hold_every_answer(plan: Any) -> None:
    text = in_words(Question.read(FLAT), plan)
    for part in (
        "RDP would have needed",
        "zero-out",
        "replace-one",
        "rounds affordable",
        "signal to noise",
        "fixed-size",
        "threshold n*",
        "start with αQ",
        "smallest at αQ",
        "assuming that",
    ):
        assert part in text


def test_alpha_zero_is_not_advised_where_it_only_follows_from_assumptions() -> None:
    """d = 4000 makes the bound smallest at 0 for σ = C, the largest it can be."""
    assumed = Question.read(FLAT | {"dimension": 4000})
    plan = make(assumed)
    assert (plan.advice.alpha_q, plan.advice.is_known) == (0.0, False)
    words = in_words(assumed, plan)
    assert "αQ: not known" in words
    assert "start with αQ" not in words
    constants = {"gradient-std": 0.03, "smoothness": 2.0, "distance": 3.0}
    known = Question.read(FLAT | {"rate": 1.0, **constants})
    plan = make(known)
    assert (plan.advice.alpha_q, plan.advice.is_known) == (0.0, True)
    words = in_words(known, plan)
    assert "start with αQ = 0 " in words
    assert "αQ = 0 releases nothing" in words


def test_words_fit_what_was_given() -> None:
    """σ cannot exceed C only if it was not given; without sampling it is Theorem 4.1's formula."""
    sure, most = Question.read(FLAT | {"dimension": 4000}), "σ cannot exceed C"
    assert most in in_words(sure, make(sure))
    given = Question.read(FLAT | {"dimension": 4000, "gradient-std": 1.5})
    assert most not in in_words(given, make(given))
    everyone = Question.read(FLAT | {"rate": 1.0})
    assert "Theorem 4.1 gives" in in_words(everyone, make(everyone))
    assert "Theorem 5.1 gives" in in_words(sure, make(sure))


def test_the_command_from_a_file(ppsgd: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = ppsgd("small.toml")
    assert (status, err) == (0, "")
    assert "200 users, each with chance 0.1 per round, 50 rounds, d = 40" in out


def test_the_command_for_machines(ppsgd: Callable[..., tuple[int, str, str]]) -> None:
    """Valid JSON: no bare infinity, even where users who differ make the bound of global learning
    infinite."""
    status, out, _ = ppsgd("small.toml", "--epsilon", "1", "--spread", "0.1", "--json")
    data = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert status == 0
    assert data["epsilon"] <= 1.0
    assert data["bounds"][-1] == ["infinite", "infinite"]


def test_the_command_with_half_of_the_arguments_asks_for_the_rest(
    ppsgd: Callable[..., tuple[int, str, str]],
) -> None:
    paper = ("--clip-norm", "1.0")
    status, out, err = ppsgd("--population", "1000", "--rounds", "100", "--delta", "1e-5", *paper)
    assert (status, out) == (2, "")
    assert [line.split()[0] for line in err.splitlines()[1:]] == [
        "--rate",
        "--epsilon",
        "--dimension",
        "--batch-size",
    ]


def test_a_file_that_is_not_there_is_one_line(ppsgd: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = ppsgd("missing.toml")
    assert status == 2
    assert err.startswith("ppsgd: missing.toml: cannot be read")
    assert len(err.splitlines()) == 1


SECURE = {**FLAT, "rate": 1.0, "secure-honest": 160, "secure-colluding": 10}


def test_a_secure_sum_says_what_dropouts_cost() -> None:
    question = Question.read(SECURE)
    secure = make(question).price.secure
    assert secure is not None
    assert (secure.clients, secure.needed, secure.may_drop_out) == (200, 170, 30)
    assert secure.extra_noise == pytest.approx(math.sqrt(200 / 160))
    assert secure.extra_noise_at_least_clients == pytest.approx(math.sqrt(170 / 160))
    assert secure.delta_for_neighbours == 0  # all 200 are neighbours
    words = in_words(question, make(question))
    assert "170 of 200 clients must stay to the end of a round: 30 may drop out" in words
    assert "11.8% more than is charged for (√(200/160)), with the fewest 3.1%" in words


def test_a_secure_sum_is_planned_without_amplification() -> None:
    everyone = make(Question.read({**FLAT, "rate": 1.0})).price
    sampled = make(Question.read({**SECURE, "rate": 0.9})).price
    assert sampled.noise_multiplier == pytest.approx(everyone.noise_multiplier, rel=1e-6)
    secure = make(Question.read(SECURE)).price
    assert secure.noise_std == pytest.approx(everyone.noise_std * math.sqrt(200 / 160), rel=1e-6)
    assert everyone.secure is None


def test_a_secure_sum_needs_its_honest_clients() -> None:
    with pytest.raises(ValueError, match="needs secure-honest too"):
        Question.read({**FLAT, "secure-colluding": 3})


def test_the_command_plans_a_secure_sum(ppsgd: Callable[..., tuple[int, str, str]]) -> None:
    arguments = [f"--{key}={value}" for key, value in SECURE.items()]
    code, out, _ = ppsgd("--json", *arguments)
    assert code == 0
    assert json.loads(out)["secure"]["may_drop_out"] == 30
