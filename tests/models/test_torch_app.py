"""``torch_client``: what is seen when the app is made, and what a node's owner is told."""

import contextlib
import functools
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from flwr_ppsgd import PPSGD, Poisson, Release, SecureSum, Steps, shared_arrays, torch_client
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.toy import flat

MADE: list[torch.device] = []


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    MADE.append(module[0].weight.device)  # type: ignore[arg-type]
    return module


PAIR = [(torch.ones(2, 2), torch.tensor([0, 1]))]


def pairs(context: Context) -> Any:
    context.node_config["partition-id"]
    return PAIR, None


def unpartitioned(context: Context) -> Any:
    context.node_config = {"partition-id": 0}
    context.node_config["num-partitions"]


def test_the_check_needs_no_values() -> None:
    """A large network is not filled with numbers twice."""
    MADE.clear()
    torch_client(network, "1.*", pairs)
    assert [device.type for device in MADE] == ["meta"]


def one_round(app: ClientApp, caplog: pytest.LogCaptureFixture) -> str:
    """What is in the log after a round, or after the attempt at one."""
    caplog.set_level(logging.DEBUG, logger="flwr")
    release = Release(Poisson(3, 1.0), clip_norm=1.0, noise_multiplier=1.0)
    strategy = PPSGD(release=release, steps=Steps.from_ratio(0.1, 0.3), delta=1e-3)
    with contextlib.suppress(Exception):
        strategy.start(InProcessGrid(app, 3), shared_arrays(network(), "1.*"), num_rounds=1)
    return caplog.text


def test_the_app_goes_to_flowers_workers(caplog: pytest.LogCaptureFixture) -> None:
    app = torch_client(network, "1.*", pairs, optimizer=torch.optim.Adam, personal_steps=2)
    assert "replies=3 zeros=0" in one_round(pickle.loads(pickle.dumps(app)), caplog)


@pytest.mark.parametrize(
    ("loaders", "words"),
    [
        (
            unpartitioned,
            "'num-partitions', and this node has ['partition-id']: start its SuperNode",
        ),
        (lambda _: PAIR, "not two loaders: return (train, test)"),
    ],
)
def test_a_nodes_owner_is_told_what_is_wrong(
    loaders: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert words in one_round(torch_client(network, "1.*", loaders), caplog)


def seeded_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def own_pairs(context: Context) -> Any:
    source = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = torch.randn(4, 2, generator=source)
    return [(x, (x[:, 0] > 0).long())], None


def test_a_torch_client_answers_a_secure_sum_as_it_is() -> None:
    """Without noise the same w as the plain sum."""
    results = []
    for aggregation in (None, SecureSum(honest=5, colluding=1)):
        grid = InProcessGrid(torch_client(seeded_network, "1.*", own_pairs), 8)
        release = Release(Poisson(8, 1.0), 1.0, 0.0, aggregation=aggregation)
        strategy = PPSGD(release=release, steps=Steps(0.5, 0.5), delta=1e-3)
        w = shared_arrays(seeded_network(), "1.*")
        results.append(flat(strategy.start(grid=grid, initial_arrays=w, num_rounds=2).arrays))
    secure, plain = results
    assert np.array_equal(secure, plain)
    assert np.any(plain)


NORMALISED = functools.partial(nn.Sequential, nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": network()}, r"give the class \(Sequential\)"),
        ({"network": "1.*", "personal": network}, "the order is torch_client"),
        ({"personal": "fc3.*"}, r"'fc3.\*' matches no parameter of Sequential"),
        ({"network": NORMALISED, "personal": "2.*"}, "tracks running statistics"),
        ({"loss": "sqared"}, "did you mean 'squared'"),
        ({"optimizer": "adam"}, "optimizer must be a class of torch.optim"),
        ({"personal_steps": 0}, "personal_steps must be a whole number"),
    ],
)
def test_wrong_arguments_are_seen_when_the_app_is_made(options: Any, message: str) -> None:
    """Not on the clients, after rounds were charged."""
    with pytest.raises(ValueError, match=message):
        torch_client(**{"network": network, "personal": "1.*", "loaders": pairs, **options})


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.body.weight


@pytest.mark.parametrize("personal", ["head.*", "body.*", "head.weight"])
def test_a_tensor_cannot_be_shared_and_personal_at_once(personal: str) -> None:
    with pytest.raises(ValueError, match="are one tensor"):
        torch_client(Tied, personal, pairs)
    assert torch_client(Tied, ["*.weight"], pairs)
