"""The promise in words: both ε, who is protected from whom, and what was chosen after looking."""

import math
from dataclasses import replace
from typing import Any

import pytest

from flwr_ppsgd import FixedSize, Ledger, Poisson, Release, SecureSum, Steps
from flwr_ppsgd.statement import Promise, raised_plan, rounded_up, with_conditions
from flwr_ppsgd.training import Training

RULES = SecureSum(honest=35, colluding=2)
PLAIN = Release(Poisson(40, 1.0), 1.0, 12.0)
SECURE = replace(PLAIN, aggregation=RULES)
DELTA = 1e-5


def promise(release: Release, **changes: Any) -> Promise:
    ledger = Ledger(DELTA).record(release, 3)
    training = Training(release=release, steps=Steps(1.0, 1.0), delta=DELTA)
    return replace(Promise(training, stated=ledger, charged=ledger, rounds_trained=3), **changes)


def texts(found: Promise) -> list[str]:
    return [found.statement(), found.short(), found.in_one_line()]


@pytest.mark.parametrize("release", [PLAIN, SECURE])
def test_every_text_has_both_epsilons(release: Release) -> None:
    ledger = Ledger(DELTA).record(release, 3)
    for text in texts(promise(release)):
        first = text.splitlines()[0]
        assert rounded_up(ledger.epsilon()) in first
        assert f"{rounded_up(ledger.epsilon('replace-one'))} if one user's data are" in first


def test_under_secure_sums_the_coalition_is_named() -> None:
    """Whoever pools with all others knows their shares of the noise: z/√h is left."""
    pooled = Ledger(DELTA).record(replace(PLAIN, noise_multiplier=12 / math.sqrt(35)), 3).epsilon()
    assert promise(SECURE).pooled() == pytest.approx(pooled)
    assert pooled > 5 * promise(SECURE).cost
    for text in texts(promise(SECURE)):
        assert "the server and any 2 of the other users together" in text
        assert rounded_up(pooled) in text.splitlines()[0]
        assert "joint" not in text
        assert "everybody" not in text
        assert "trusted" not in text
    data = promise(SECURE).as_data()
    assert data["guarantee"].endswith("against the server and any 2 of the other users together")
    assert data["epsilon_all_others_pooling"] == pytest.approx(pooled)
    alone = replace(SECURE, aggregation=SecureSum(honest=35, colluding=0))
    assert "the server alone learns no more" in promise(alone).statement()


SPARSE = Release(Poisson(300, 1.0), 1.0, 4.0, aggregation=SecureSum(280, 2))
DRAWN = Release(FixedSize(300, 40), 1.0, 4.0, aggregation=RULES)


@pytest.mark.parametrize(("release", "complete"), [(SECURE, True), (SPARSE, False), (DRAWN, False)])
def test_what_a_server_that_lies_can_read_is_said(release: Release, complete: bool) -> None:
    """Clients hold the number of participants to the population, not to the cohort."""
    text = promise(release).statement()
    assert "as long as the server follows the protocol" in text
    assert ("never one vector alone" in text) == complete
    assert ("it can then read single vectors" in text) != complete


@pytest.mark.parametrize("release", [PLAIN, SECURE])
def test_no_condition_or_caveat_is_missing_in_the_short_form(release: Release) -> None:
    caveats = ("Charges are not recorded elsewhere: the disk is full.", "Nodes came back.")
    conditions = ["provided that the columns and classes are public: they were looked for"]
    found = promise(release, caveats=caveats, evaluated=True)
    data = with_conditions(found.as_data(), conditions)
    assert data["conditional_on"] == conditions
    assert len(data["short"].splitlines()) == 5
    for name in ("conditional_on", "caveats", "outside_the_guarantee"):
        for text in data[name]:
            assert text.partition(":")[0] in data["short"]
    assert "Evaluation on the users' own data was on" in data["short"]
    for text in (*caveats, conditions[0][1:], "the server saw each user's measures"):
        assert text in data["statement"]
    assert data["statement"].splitlines()[1].startswith("Provided that the columns")
    assert with_conditions(found.as_data(), []) == found.as_data()


def test_delta_is_a_slack_and_not_a_probability_of_failure() -> None:
    text = promise(PLAIN).statement()
    assert "Delta is a small slack in the bound" in text
    assert "at most e^epsilon times its probability without them, plus delta" in text


def test_a_plan_that_gets_dearer_after_a_charge_is_a_caveat() -> None:
    """More rounds, less noise, another release: all the same; fewer rounds are none."""
    before = Ledger(DELTA).record(PLAIN, 3)
    dearer = [
        before.record(PLAIN),
        before.record(replace(PLAIN, clip_norm=2.0)),
        Ledger(DELTA).record(PLAIN, 2).record(replace(PLAIN, noise_multiplier=6.0)),
    ]
    for after in dearer:
        caveat = raised_plan(before, after, charges=1)
        assert f"from epsilon = {rounded_up(before.epsilon())} to" in caveat
        assert rounded_up(after.epsilon()) in caveat
        assert raised_plan(before, after, charges=0) == ""
    for after in (before, Ledger(DELTA).record(PLAIN, 2)):
        assert raised_plan(before, after, charges=1) == ""


ROUNDED_UP = {0.0: "0", 1.2340000001: "1.235", 12345.6: "1.235e+04", 0.00012341: "0.0001235"}


@pytest.mark.parametrize(("value", "text"), [*ROUNDED_UP.items(), (2.0, "2"), (math.inf, "inf")])
def test_text_is_rounded_up(value: float, text: str) -> None:
    assert rounded_up(value) == text
