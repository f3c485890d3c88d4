"""Secure sums on real SuperNodes, with clients killed between the exchanges of a round."""

from pathlib import Path

import numpy as np
import pytest

from flwr_ppsgd.client.report import client_report
from tests.deployment.harness import Deployment

PEOPLE = ("ada", "ben", "cleo", "dan", "eve")
STEP = 0.5


@pytest.mark.deployment
def test_clients_killed_between_exchanges_leave_the_sum_of_the_others(tmp_path: Path) -> None:
    """Round 1: gone before shares; 2: before the masked vector; 3: before it is unmasked."""
    deployment = Deployment(tmp_path, PEOPLE)
    with deployment.federation:
        deployment.start()
        deployment.tell("ben", "die 1 2")
        deployment.tell("cleo", "die 2 3")
        deployment.tell("dan", "die 3 4")
        run = deployment.begin(
            "killed",
            3,
            noise_multiplier=0.0,
            clip_norm=100.0,
            step=STEP,
            alpha_q=1.0,
            min_online=1.0,
            secure_honest=4,
            secure_colluding=0,
        )
        assert deployment.finish(run) == "finished:completed"
    assert deployment.charges("killed") == [1, 2, 3]
    absent = {1: "ben", 2: "cleo", 3: ""}  # in round 3 the vector had been sent
    w = np.zeros(6)
    theta = {user: np.zeros(6) for user in PEOPLE}
    for round_ in (1, 2, 3):
        total = np.zeros(6)
        for user in PEOPLE:
            if user == absent[round_]:
                continue
            gradient = w + theta[user] - np.load(deployment.place(user) / "y.npy")
            theta[user] = theta[user] - STEP * gradient
            total = total + gradient
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
