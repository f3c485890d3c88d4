"""What a new user gets wrong, and the one line that each mistake brings."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd import (
    PPSGD,
    AdditiveLinear,
    Minibatches,
    Poisson,
    Release,
    Steps,
    client_app,
    shared_arrays,
    torch_client,
)
from flwr_ppsgd.legacy import PPSGDClient, PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.targets import run_legacy

NODES = 10
PERSONAL = "2.*"


def network(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def wider() -> nn.Module:
    return network(5)


def loaders_of(*arrays: torch.Tensor) -> Any:
    """``loaders`` of clients that all have these rows."""
    return lambda _: (DataLoader(TensorDataset(*arrays), batch_size=3), None)


X = torch.ones(6, 3)
Y = torch.arange(6) % 2
loaders = loaders_of(X, Y)


def by_partition(context: Context) -> Any:
    rows = int(context.node_config["patient-id"])
    return loaders_of(X[:rows], Y[:rows])(context)


def narrow(context: Context) -> AdditiveLinear:  # noqa: ARG001
    batches = Minibatches(np.ones((6, 3)), np.ones(6), 3, seed=0, user=0)
    return AdditiveLinear(batches, num_features=3)


def settings(**changes: Any) -> Any:
    release = Release(Poisson(NODES, 1.0), clip_norm=1.0, noise_multiplier=1.0)
    steps = Steps.from_ratio(0.1, 0.3)
    return {"release": release, "steps": steps, "delta": 1e-3, **changes}


def shared() -> ArrayRecord:
    return shared_arrays(network(), PERSONAL)


def start(app: ClientApp, arrays: ArrayRecord | None = None, **changes: Any) -> PPSGD:
    ppsgd = PPSGD(**settings(**changes))
    ppsgd.start(InProcessGrid(app, NODES), arrays or shared(), num_rounds=2)
    return ppsgd


SHAPES = "'0.weight' has shape (4, 3) in the server's w and (5, 3) in this client's network"
NAMES = (
    "the server's w has ['0.bias', '0.weight'] that is not shared here, and lacks "
    "['2.bias', '2.weight'] that is: personal=['0.*'], additive=False on this client"
)
ADDITIVE = "lacks ['2.bias', '2.weight'] that is: personal=['2.*'], additive=True on this client"
OTHER_MODELS = {
    "width": (torch_client(wider, PERSONAL, loaders), SHAPES),
    "personal": (torch_client(network, "0.*", loaders), NAMES),
    "additive": (torch_client(network, PERSONAL, loaders, additive=True), ADDITIVE),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_another_model_on_the_clients_costs_nothing(
    other: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is seen in the check before the first round, which reads no data."""
    app, words = OTHER_MODELS[other]
    ppsgd = PPSGD(**settings())
    with pytest.raises(RuntimeError, match=r"refused-message.*Nothing was charged"):
        ppsgd.start(InProcessGrid(app, NODES), shared(), num_rounds=2)
    assert words in caplog.text
    assert ppsgd.ledger.rounds == 0


NO_BATCH = "a loader has no batch: a user needs at least one row; give this node data"
PARTS = "a batch has 3 parts where (x, y) has 2: say which are which, such as inputs="
NOT_FINITE = "part 'x' of a batch holds NaN or infinity: clean this user's data"
WRONG_LOADERS = {
    NO_BATCH: loaders_of(X[:0], Y[:0]),
    PARTS: loaders_of(X, Y, Y),
    NOT_FINITE: loaders_of(X * float("nan"), Y),
}


@pytest.mark.parametrize("words", WRONG_LOADERS)
def test_wrong_loaders_bring_one_line_on_the_client(
    words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="learner-failed: ValueError"):
        start(torch_client(network, PERSONAL, WRONG_LOADERS[words]))
    lines = [record for record in caplog.records if words in record.getMessage()]
    assert len(lines) == 1  # nodes in one process show it once
    assert not any(record.exc_info for record in lines)


def test_an_error_in_a_users_own_code_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="learner-failed: KeyError"):
        start(torch_client(network, PERSONAL, by_partition))
    assert "in by_partition" in caplog.text
    assert "KeyError: 'patient-id'" in caplog.text


def test_another_width_of_a_linear_model_is_named_in_both_apis(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = "the server's w has 4 parameters and this client's has 3 features × 1 outputs = 3"
    with pytest.raises(RuntimeError, match="client"):
        start(client_app(narrow), ArrayRecord([np.zeros((4, 1))]))
    assert words in caplog.text
    caplog.clear()
    initial = ndarrays_to_parameters([np.zeros((4, 1))])

    def client_fn(context: Context) -> Client:
        return PPSGDClient(narrow(context), context).to_client()

    strategy = PPSGDStrategy(**settings(initial_parameters=initial))
    with pytest.raises(RuntimeError, match="client"):
        run_legacy(strategy, InProcessGrid(ClientApp(client_fn), NODES), strategy.server_config(2))
    assert words in caplog.text


def test_a_delta_that_protects_nobody_is_said_before_the_first_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="flwr.ppsgd")
    start(torch_client(network, PERSONAL, loaders), delta=1 / NODES - 1e-9)
    assert "NO GUARANTEE" not in caplog.text
    caplog.clear()
    release = Release(Poisson(12, 1.0), clip_norm=1.0, noise_multiplier=1.0)
    start(torch_client(network, PERSONAL, loaders), delta=0.09, release=release)
    said = [record.getMessage() for record in caplog.records]
    (first, *_) = [place for place, text in enumerate(said) if "NO GUARANTEE: delta = 0.09" in text]
    assert "choose delta well below 0.0833333" in said[first]
    assert first < min(place for place, text in enumerate(said) if "round=1 " in text)


def test_a_state_dict_is_no_record() -> None:
    with pytest.raises(ValueError, match="initial_arrays must be an ArrayRecord, got a"):
        start(torch_client(network, PERSONAL, loaders), network().state_dict())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["train_config", "evaluate_config"])
def test_a_plain_dict_is_no_config(name: str) -> None:
    server = PPSGD.auto(population=NODES, epsilon=8.0, delta=1e-3, rounds=3)
    on = InProcessGrid(torch_client(network, PERSONAL, loaders), NODES)
    arrays = shared_arrays(network(), PERSONAL)
    config: Any = {"learning-rate": 0.1}
    with pytest.raises(ValueError, match="config must be a ConfigRecord, got a dict: wrap it"):
        server.start(on, arrays, **{name: config})
    with pytest.raises(ValueError, match="config must be a ConfigRecord, got a dict: wrap it"):
        server.configure_train(1, arrays, config, on)
    assert server.ledger.rounds == 0


def test_fewer_rounds_than_auto_would_take_spend_the_same_epsilon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = PPSGD.auto(population=NODES, epsilon=8.0, delta=1e-3, rounds=3)
    before = server.release.noise_multiplier
    grid = InProcessGrid(torch_client(network, PERSONAL, loaders), NODES)
    measures = MetricRecord({"central": 1.5})
    server.start(
        grid, shared_arrays(network(), PERSONAL), num_rounds=2, evaluate_fn=lambda *_: measures
    )
    assert server.release.noise_multiplier < before
    assert 7.99 < server.ledger.epsilon() <= 8.0
    assert "evaluate_fn: central 1.5" in caplog.text
