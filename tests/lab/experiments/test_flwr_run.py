"""Through ``flwr run`` and Ray: the same w, and a failure that is one."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

from flwr_ppsgd import Order, client_step
from flwr_ppsgd.client.legacy_api import PPSGDClient
from flwr_ppsgd.lab.experiments import flwr_run as flower
from flwr_ppsgd.lab.experiments.run import run
from flwr_ppsgd.lab.experiments.settings import Experiment
from flwr_ppsgd.lab.experiments.tasks import learner_for
from flwr_ppsgd.noise import Coins
from flwr_ppsgd.server.legacy_api import PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from tests.server.test_legacy_api import recording, run_legacy
from tests.support.paths import ROOT
from tests.support.steps import noisy_step
from tests.support.toy import Floats, flat

EXPERIMENT = Experiment.load(
    overrides={
        "population": 6,
        "rounds": 3,
        "insecure-seed": 11,
        "evaluate-every": 0,
        "clip-norm": 200.0,
    }
)
TRAINING = EXPERIMENT.training
FEATURES = EXPERIMENT.problem.features


def by_the_pure_core() -> Floats:
    """server_step and client_step over the same data and noise, in plain floating point."""
    release = TRAINING.release()
    steps = TRAINING.steps()
    grid = InProcessGrid(ClientApp(), 6, EXPERIMENT.to_flat())
    learners = [learner_for(grid.context(node)) for node in grid.get_node_ids()]
    w = np.zeros(FEATURES)
    thetas = [learner.initial_theta() for learner in learners]
    for t in range(1, TRAINING.rounds + 1):
        sent = []
        for i, learner in enumerate(learners):
            order = Order(t, steps.personal, release.clip_norm, "mean", True, visit=t)
            vector, thetas[i] = client_step(
                thetas[i],
                *learner.gradients(w, thetas[i], order),
                release.clip_norm,
                steps.personal,
            )
            sent.append(vector)
        noise = release.noise_std * Coins.insecure(11, "noise", t).normals(len(w))
        w = noisy_step(w, sent, release, steps.shared, noise)
    return w


def legacy_client(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context).to_client()


def by_the_legacy_api() -> Floats:
    ppsgd: Any = PPSGDStrategy(
        release=TRAINING.release(),
        steps=TRAINING.steps(),
        delta=TRAINING.delta,
        initial_parameters=ndarrays_to_parameters([np.zeros(FEATURES)]),
        insecure_seed=11,
    )
    published = recording(ppsgd)
    run_legacy(ppsgd, 3, InProcessGrid(ClientApp(client_fn=legacy_client), 6, EXPERIMENT.to_flat()))
    return np.asarray(parameters_to_ndarrays(published[-1])[0], dtype=np.float64)


def test_one_core_four_ways(tmp_path: Path) -> None:
    """The pure core, the Message API, the legacy API and Flower's Ray simulation give the same w.

    The last three sum whole multiples of the grid, so they agree to the last bit, whatever the
    order of replies.
    """
    flower.run(EXPERIMENT, tmp_path / "out")
    by_ray = np.load(tmp_path / "out" / "model.npz")["w"]
    by_messages = flat(run(EXPERIMENT).w)
    np.testing.assert_array_equal(by_ray, by_messages)
    np.testing.assert_array_equal(by_legacy := by_the_legacy_api(), by_messages)
    assert np.linalg.norm(by_legacy) > 1
    roundings = 3 * 7 / 6  # (N + 1) of them over D, in 3 rounds
    grid_rounding = roundings * TRAINING.steps().shared * TRAINING.release().grid
    np.testing.assert_allclose(by_messages, by_the_pure_core(), rtol=1e-12, atol=2 * grid_rounding)


def test_a_secure_sum_through_ray_gives_the_plain_w(tmp_path: Path) -> None:
    """Keys and shares live in the nodes' state, which Ray carries from message to message."""
    silent = {**EXPERIMENT.to_flat(), "noise-multiplier": 0.0, "rounds": 2}
    secure = {**silent, "secure-honest": 5, "secure-colluding": 0}
    flower.run(Experiment.read(secure, "secure"), tmp_path / "out")
    (by_ray,) = np.load(tmp_path / "out" / "model.npz").values()
    np.testing.assert_array_equal(by_ray, flat(run(Experiment.read(silent, "plain")).w))


def test_a_run_that_failed_is_reported_as_failed_though_flower_exits_with_0(tmp_path: Path) -> None:
    """A file stands where the ServerApp should make its output directory."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(flower.FlowerRunError, match="finished:failed"):
        flower.run(EXPERIMENT, tmp_path / "file" / "out")


def test_flwr_run_at_the_root(tmp_path: Path) -> None:
    """``flwr run .``, as a user types it in a checkout, with one setting changed."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("flwr_ppsgd", "simulations"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    flower.run_app(checkout, nodes=10, changes=f"rounds=2 out='{tmp_path / 'out'}'")
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3
