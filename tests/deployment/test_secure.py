"""Secure sums on real SuperNodes, with clients killed between the exchanges of a round."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flwr_ppsgd.client.report import client_report
from simulations.deployment.federation import write_app
from tests.deployment.harness import Deployment

pytestmark = pytest.mark.deployment
PEOPLE = ("ada", "ben", "cleo", "dan", "eve")
STEP = 0.5
MODULE = Path(__file__).with_name("secure_app.py")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("secure"))
    with made.federation:
        made.start(PEOPLE)
        yield made


def begin(deployment: Deployment, name: str, rounds: int, noise: float) -> int:
    """``flwr run`` of a training whose server sees sums only; one of five may drop out."""
    deployment.server(name).mkdir()
    config = {
        "population": len(PEOPLE),
        "enrolled": ",".join(PEOPLE),
        "rate": 1.0,
        "clip-norm": 100.0,
        "noise-multiplier": noise,
        "delta": 1e-4,
        "step": STEP,
        "alpha-q": 1.0,
        "rounds": rounds,
        "min-online": 1.0,
        "round-timeout": 45.0,
        "secure-honest": 4,
        "secure-colluding": 0,
        "checkpoint-dir": str(deployment.server(name)),
        "ppsgd-run": name,
    }
    components = {"serverapp": "secure_app:server", "clientapp": "secure_app:client"}
    app = write_app(deployment.directory / f"app-{name}", [MODULE], components, config)
    return deployment.federation.run(app)


def test_clients_killed_between_exchanges_leave_the_sum_of_the_others(
    deployment: Deployment,
) -> None:
    """Round 1: gone before shares; 2: before the masked vector; 3: before it is unmasked."""
    deployment.tell("ben", "1 2")
    deployment.tell("cleo", "2 3")
    deployment.tell("dan", "3 4")
    run = begin(deployment, "killed", 3, noise=0.0)
    assert deployment.finish(run, seconds=1500) == "finished:completed"
    assert deployment.charges("killed") == [1, 2, 3]
    absent = {1: "ben", 2: "cleo", 3: ""}  # in round 3 the vector had been sent
    w = np.zeros(6)
    theta = {user: np.zeros(6) for user in PEOPLE}
    for round_ in (1, 2, 3):
        present = [user for user in PEOPLE if user != absent[round_]]
        gradients = {}
        for user in present:
            y = np.load(deployment.place(user) / "y.npy")
            gradients[user] = w + theta[user] - y
            theta[user] = theta[user] - STEP * gradients[user]
        total = sum(gradients[user] for user in present)
        w = w - STEP * total / len(PEOPLE)
        found = np.load(deployment.server("killed") / f"w-{round_}.npy")
        np.testing.assert_allclose(found, w, atol=1e-6)
    for user in PEOPLE:
        save = deployment.kept("killed", user)
        assert save is not None
        np.testing.assert_allclose(save.theta, theta[user], atol=1e-6)
    statement = (deployment.server("killed") / "statement.txt").read_text()
    assert "secure sum of one vector per user" in statement
    report = client_report(deployment.place("ada") / "state")
    assert "masked vectors: 3" in report
