"""The legacy API keeps the same promise."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_proxy import ClientProxy

from flwr_ppsgd import PrivateMetrics
from flwr_ppsgd.client.app import PPSGDClient
from flwr_ppsgd.server.legacy import PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.hostile_clients import Named, legacy_strategy, named_clients
from tests.contract.targets import run_legacy
from tests.support.toy import SIZE, Floats, release, toy_learner
from tests.test_settings import RUN_CONFIG

ONE = np.full(SIZE, 0.1)


def client_fn(context: Context) -> Client:
    return PPSGDClient(toy_learner(context), context, local_step=0.5).to_client()


def legacy(**changes: Any) -> PPSGDStrategy:
    """Without noise unless it is given."""
    return legacy_strategy(**{"release": release(), **changes})


def result(*arrays: Floats, loss: float = 1e9) -> FitRes:
    return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(arrays)), 10**9, {"loss": loss})


def test_initial_parameters_are_required() -> None:
    with pytest.raises(ValueError, match="initial_parameters"):
        legacy(initial_parameters=None)
    assert legacy().initialize_parameters(named_clients()).tensors


def evaluated(loss: float, count: int, **metrics: Any) -> tuple[ClientProxy, EvaluateRes]:
    return Named("0"), EvaluateRes(Status(Code.OK, ""), loss, count, metrics)


def test_what_is_not_finite_does_not_spoil_the_means() -> None:
    results = [
        evaluated(2.0, 1, distance=1.0),
        evaluated(math.nan, 5, distance=math.inf),
        evaluated(4.0, 3, distance=3.0, name="text"),
    ]
    loss, means = legacy().aggregate_evaluate(1, results, [])
    assert loss == pytest.approx(3.5)
    assert means == {"distance": pytest.approx(2.5)}


def test_evaluation_goes_by_absolute_rounds_and_comes_after_the_last(tmp_path: Path) -> None:
    """Three rounds, then a restart: rounds 4 and 5 follow, and 5 is the last of the plan."""
    asked: list[int] = []

    def train(total: int) -> None:
        ppsgd = legacy(evaluate_every=2, checkpoint_dir=tmp_path)
        ppsgd.server_config(total)
        initial = ppsgd.initialize_parameters(named_clients())
        for server_round in range(1, ppsgd.remaining_rounds(total) + 1):
            ppsgd.configure_fit(server_round, initial, named_clients())
            parameters, _ = ppsgd.aggregate_fit(server_round, [], [])
            sent = ppsgd.configure_evaluate(server_round, parameters, named_clients())
            asked.extend(int(instructions.config["round"]) for _, instructions in sent[:1])
        ppsgd.close()

    train(3)
    train(5)
    assert asked == [2, 3, 4, 5]


@pytest.mark.parametrize("evaluate_every", [0, 2])
def test_the_statement_is_logged_after_the_last_round(
    evaluate_every: int, caplog: pytest.LogCaptureFixture
) -> None:
    ppsgd = legacy(release=release(z=1.0), evaluate_every=evaluate_every)
    config = ppsgd.server_config(3)
    with caplog.at_level("INFO", logger="flwr.ppsgd"):
        run_legacy(ppsgd, InProcessGrid(ClientApp(client_fn=client_fn), 5), config)
    statements = [line for line in caplog.messages if line.startswith("ε = ")]
    assert statements == [ppsgd.privacy_data()["short"]]


def test_clients_that_return_parameters_are_clipped_as_gradients() -> None:
    """w − w_i, as of ``PPSGD(replies="parameters")``; such a client gets no Order."""
    ppsgd = legacy(replies="parameters")
    initial = ppsgd.initialize_parameters(named_clients())
    asked = ppsgd.configure_fit(1, initial, named_clients())
    assert [set(instructions.config) for _, instructions in asked] == [{"server_round"}] * 5
    parameters, _ = ppsgd.aggregate_fit(1, [(asked[0][0], result(ONE))], [])
    moved = parameters_to_ndarrays(parameters)[0]
    np.testing.assert_allclose(moved, ONE / 5, rtol=1e-8)


def test_private_measures_come_back_as_in_the_message_api() -> None:
    metrics = PrivateMetrics({"loss": 2.0}, share=0.25)
    ppsgd = legacy(metrics=metrics)
    initial = ppsgd.initialize_parameters(named_clients())
    asked = ppsgd.configure_fit(1, initial, named_clients())
    replies = [(client, result(ONE, loss=1.5)) for client, _ in asked]
    _, released = ppsgd.aggregate_fit(1, replies, [])
    assert released["loss"] == pytest.approx(1.5, rel=1e-6)


def test_a_legacy_strategy_from_a_run_config() -> None:
    config = {**RUN_CONFIG, "replies": "parameters"}
    initial = ndarrays_to_parameters([np.zeros(SIZE)])
    ppsgd = PPSGDStrategy.from_config(config, initial_parameters=initial)
    assert ppsgd.ledger.delta == 1e-5
    assert ppsgd.training.replies == "parameters"


def test_central_evaluation_gets_the_absolute_round_and_w(tmp_path: Path) -> None:
    seen: list[int] = []

    def central(round_: int, arrays: list[Floats], config: dict[str, Any]) -> tuple[float, Any]:
        assert config == {}
        assert arrays[0].shape == (SIZE,)
        seen.append(round_)
        return 0.5, {"accuracy": 0.25}

    for total in (2, 3):
        ppsgd = legacy(evaluate_fn=central, checkpoint_dir=tmp_path)
        on = InProcessGrid(ClientApp(client_fn=client_fn), 5)
        run_legacy(ppsgd, on, ppsgd.server_config(total))
        ppsgd.close()
    assert seen == [0, 1, 2, 2, 3]
    assert legacy().evaluate(1, ppsgd.initialize_parameters(named_clients())) is None


FAILED = FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no data"), Parameters([], ""), 0, {})


@pytest.mark.parametrize("failure", [(Named("3"), FAILED), RuntimeError("no data")])
def test_a_failure_is_counted_once(failure: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of five, three answer, one fails and one is silent."""
    ppsgd = legacy()
    ppsgd.configure_fit(1, ndarrays_to_parameters([np.zeros(SIZE)]), named_clients())
    results = [(Named(str(user)), result(ONE)) for user in range(3)]
    with caplog.at_level("DEBUG", logger="flwr.ppsgd"):
        ppsgd.aggregate_fit(1, results, [failure])  # type: ignore[arg-type]
    assert "replies=3 zeros=2 client-error=1 missing=1; the first: no data" in caplog.text
