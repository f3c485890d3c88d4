"""Arguments of a wrong kind are refused when the strategy is made, each in one line."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common import ndarrays_to_parameters

from flwr_ppsgd import PPSGD, Poisson, PrivateMetrics, Release, SecureSum, client_app
from flwr_ppsgd.legacy import PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.training import Enrolled, Training
from tests.contract.hostile_clients import legacy_strategy
from tests.support.toy import strategy, toy_learner, w0

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "release": ({"release": {}}, r"release must be a Release, got \{\}"),
    "steps": ({"steps": (1, 2)}, r"steps must be Steps, got \(1, 2\)"),
    "enrolled": ({"enrolled": "abcde"}, "enrolled must be a list .*, got 'abcde'"),
    "population": ({"enrolled": ["ada"]}, "enrolled names 1 different nodes but .* is 5"),
    "checkpoint_dir": ({"checkpoint_dir": ""}, "checkpoint_dir must be a path, got ''"),
    "budget_dir": ({"budget_dir": 3}, "budget_dir must be a path, got 3"),
    "enrolled number": ({"enrolled": 5}, "enrolled must be a list .*, got 5"),
    "enrolled numbers": ({"enrolled": [1.5]}, r"enrolled must be a list .*, got \[1.5\]"),
    "delta": ({"delta": math.nan}, r"delta must be a number in \(0, 0.1\), got nan"),
    "delta text": ({"delta": "1e-5"}, r"delta must be a number in .* got '1e-5'"),
    "delta none": ({"delta": None}, r"delta must be a number in .* got None"),
    "max_epsilon true": ({"max_epsilon": True}, "max_epsilon must be positive .*, got True"),
    "round_timeout none": ({"round_timeout": None}, "round_timeout must be positive, got None"),
    "average": ({"average": "no"}, "average must be a bool, got 'no'"),
    "max_epsilon": ({"max_epsilon": 0}, "max_epsilon must be positive and finite, got 0"),
    "evaluate_every": ({"evaluate_every": True}, "evaluate_every must be a whole number"),
    "checkpoint_every": ({"checkpoint_every": 0}, "checkpoint_every must be .* at least 1, got 0"),
    "round_timeout": ({"round_timeout": -1.0}, "round_timeout must be positive, got -1.0"),
    "replies": ({"replies": "weights"}, "replies must be 'gradient' or 'parameters'"),
    "metrics": ({"metrics": ["loss"]}, r"metrics must be PrivateMetrics, got \['loss'\]"),
    "seed": ({"insecure_seed": 0.5}, "insecure_seed must be a whole number, got 0.5"),
    "measures of stock clients": (
        {"replies": "parameters", "metrics": PrivateMetrics({"loss": 1.0})},
        "metrics needs clients that obey Orders",
    ),
    "secure sums of stock clients": (
        {"replies": "parameters", "release": Release(Poisson(5, 1.0), 1, 1, None, SecureSum(3, 1))},
        "needs clients that obey Orders",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("make", [strategy, legacy_strategy])
def test_wrong_arguments_are_refused_at_once(make: Any, name: str) -> None:
    arguments, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        make(**arguments)


@pytest.mark.parametrize("wrong", [{"delta": 0.5}, {"enrolled": ["ada", "ada"]}])
def test_nothing_is_written_for_arguments_that_are_refused(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"delta must be|enrolled names 1 different nodes"):
        strategy(checkpoint_dir=tmp_path / "training", **wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rounds", [-1, 2.5, True])
def test_a_number_of_rounds_that_is_none_is_refused(rounds: Any) -> None:
    ppsgd = strategy()
    with pytest.raises(ValueError, match="num_rounds must be a whole number"):
        ppsgd.start(InProcessGrid(client_app(toy_learner), 5), w0(), num_rounds=rounds)
    assert ppsgd.ledger.rounds == 0


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_w_that_is_not_finite_is_refused_before_anything_is_sent(number: float) -> None:
    ppsgd = strategy()
    initial = np.full(6, number)
    with pytest.raises(ValueError, match="NaN or infinity"):
        ppsgd.start(InProcessGrid(client_app(toy_learner), 5), w0(initial), num_rounds=1)
    assert ppsgd.ledger.rounds == 0
    with pytest.raises(ValueError, match="NaN or infinity"):
        legacy_strategy(initial_parameters=ndarrays_to_parameters([initial]))


def test_both_apis_take_the_same_arguments() -> None:
    own = {"initial_parameters", "evaluate_fn"}
    arguments = set(PPSGD.__init__.__annotations__) - {"return"}
    assert set(PPSGDStrategy.__init__.__annotations__) - {"return"} - own == arguments
    assert len(arguments) == 14
    assert arguments | {"recipe"} == set(Training.__dataclass_fields__)


@pytest.mark.parametrize("name", ["nodes", "min_online", "wait_timeout"])
@pytest.mark.parametrize("value", ["x", 5.5, True, [None], math.nan])
def test_who_is_enrolled_is_checked_too(name: str, value: Any) -> None:
    if (name, value) != ("wait_timeout", 5.5):
        with pytest.raises(ValueError, match=r"must be .*, got"):
            Enrolled(**{name: value})


def test_enrolled_may_be_any_collection_of_names() -> None:
    assert Enrolled(iter(["a", "b"])).nodes == ("a", "b")
