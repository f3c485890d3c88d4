"""One core, four ways to run it: the same data, cohorts and noise give the same w."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd import (
    PPSGD,
    AdditiveLinear,
    FixedSize,
    Minibatches,
    Poisson,
    Release,
    Steps,
    client_app,
    shared_arrays,
    torch_client,
    torch_learner,
)
from flwr_ppsgd.legacy import PPSGDClient, PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.command import ppsgd
from tests.contract.files import privacy_of
from tests.contract.targets import Floats, flat, run_legacy, user_of

USERS = 8
FEATURES = 4
ROUNDS = 5
BATCH = 3
SIZES = 4 + np.arange(USERS)
OWNER = np.repeat(np.arange(USERS), SIZES)
TEST = np.append(OWNER[1:] != OWNER[:-1], True)  # each user's last row
SOURCE = np.random.default_rng(0)
X = SOURCE.normal(size=(len(OWNER), FEATURES))
Y = X @ SOURCE.normal(size=FEATURES) + SOURCE.normal(size=USERS)[OWNER]
CLIP, NOISE, STEP, ALPHA_Q, DELTA, SEED = 1.5, 0.7, 0.2, 0.5, 1e-4, 5
STEPS = Steps.from_ratio(STEP, ALPHA_Q)
CASES: dict[str, tuple[Release, dict[str, Any]]] = {
    "everyone": (Release(Poisson(USERS, 1.0), CLIP, NOISE), {"rate": 1.0}),
    "Poisson": (Release(Poisson(USERS, 0.5), CLIP, NOISE), {"rate": 0.5}),
    "fixed size": (Release(FixedSize(USERS, 3), CLIP, NOISE), {"cohort-size": 3}),
    "Algorithm 2": (
        Release(Poisson(USERS, 0.5), CLIP, NOISE, total_batch=24),
        {"rate": 0.5, "total-batch": 24},
    ),
}
SETTINGS: dict[str, Any] = {
    "clip-norm": CLIP,
    "noise-multiplier": NOISE,
    "step": STEP,
    "alpha-q": ALPHA_Q,
    "delta": DELTA,
    "insecure-seed": SEED,
    "batch-size": BATCH,
    "data-seed": 1,
    "rounds": ROUNDS,
    "evaluate-every": 0,
    "scale": "none",
    "bias": False,
    "task": "regression",
}


def linear_learner(context: Context) -> AdditiveLinear:
    user = user_of(context)
    own = (user == OWNER) & ~TEST
    targets = Y[own].reshape(-1, 1)
    batches = Minibatches(X[own], targets, BATCH, seed=1, user=user)
    return AdditiveLinear(batches, FEATURES)


def legacy_linear_client(context: Context) -> Client:
    return PPSGDClient(linear_learner(context), context).to_client()


def by_messages(release: Release, app: ClientApp, w: ArrayRecord) -> Floats:
    strategy = PPSGD(release=release, steps=STEPS, delta=DELTA, insecure_seed=SEED)
    return flat(strategy.start(InProcessGrid(app, USERS), w, num_rounds=ROUNDS).arrays)


def by_legacy(release: Release, app: ClientApp, w: ArrayRecord) -> Floats:
    """Through Flower's own legacy loop. Central evaluation is where its w can be seen."""
    seen: list[Floats] = []

    def look(_: int, arrays: list[Any], __: dict[str, Any]) -> None:
        seen.append(np.concatenate([array.reshape(-1) for array in arrays]))

    initial: Parameters = ndarrays_to_parameters(w.to_numpy_ndarrays())
    strategy = PPSGDStrategy(
        release=release,
        steps=STEPS,
        delta=DELTA,
        insecure_seed=SEED,
        initial_parameters=initial,
        evaluate_fn=look,
    )
    run_legacy(strategy, InProcessGrid(app, USERS), strategy.server_config(ROUNDS))
    assert strategy.ledger.rounds == ROUNDS
    assert len(seen) == ROUNDS + 1
    np.testing.assert_array_equal(seen[0], flat(ArrayRecord(parameters_to_ndarrays(initial))))
    return seen[-1]


def data_file(directory: Path) -> Path:
    path = directory / "users.npz"
    np.savez(path, user=OWNER, x=X, y=Y, test=TEST)
    return path


def by_command(directory: Path, engine: str, data: Path, settings: dict[str, Any]) -> Floats:
    """w of ``ppsgd run`` on a file of users' rows."""
    experiment = directory / f"{engine}.toml"
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
    experiment.write_text("\n".join(lines))
    out = directory / engine
    ended = ppsgd("run", experiment, "--data", data, "--engine", engine, "--out", out)
    assert ended.status == 0, ended.err
    with np.load(out / "model.npz") as model:
        names = [name for name in model.files if name != "schema-sha256"]
        arrays = [model[name].reshape(-1) for name in names]
    return np.concatenate(arrays)


def _toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower()


def rounding(release: Release) -> float:
    """How far sums on the grid and sums in floating point can lie apart after all rounds.

    Each of N + 1 terms of a round is off by less than C·2⁻²⁴: by a step of the grid, C·2⁻²⁶ at
    z < 1, and by the margin of the clip. Later gradients move by less than w does.
    """
    terms = (USERS + 1) * CLIP * 2.0**-24
    return ROUNDS * STEPS.shared * terms / release.denominator


@pytest.mark.parametrize("case", CASES)
def test_linear_models_get_the_same_w_in_all_ways(tmp_path: Path, case: str) -> None:
    """To the last bit where sums are on the grid. The cohort engine sums in floating point."""
    release, keys = CASES[case]
    initial = ArrayRecord([np.zeros((FEATURES, 1))])
    w = by_messages(release, client_app(linear_learner), initial)
    assert np.linalg.norm(w) > 0.01
    legacy = by_legacy(release, ClientApp(client_fn=legacy_linear_client), initial)
    np.testing.assert_array_equal(legacy, w)
    data = data_file(tmp_path)
    settings = {**SETTINGS, **keys}
    np.testing.assert_array_equal(by_command(tmp_path, "process", data, settings), w)
    as_cohort = by_command(tmp_path, "cohort", data, settings)
    np.testing.assert_allclose(as_cohort, w, rtol=0, atol=rounding(release))


def test_flowers_own_simulation_gives_the_same_w_and_statement(tmp_path: Path) -> None:
    """``flwr run`` and Ray, with replies in whatever order they come.

    Everyone takes part: Flower draws the ids of its nodes, so which user has which coin is chance.
    """
    release, keys = CASES["everyone"]
    initial = ArrayRecord([np.zeros((FEATURES, 1))])
    w = by_messages(release, client_app(linear_learner), initial)
    data = data_file(tmp_path)
    settings = {**SETTINGS, **keys}
    np.testing.assert_array_equal(by_command(tmp_path, "flower", data, settings), w)
    by_command(tmp_path, "process", data, settings)
    assert privacy_of(tmp_path / "flower") == privacy_of(tmp_path / "process")


# Networks: float32, so the order of additions inside a gradient shows in the last digits.

CLASSES = 3
LABELS = SOURCE.integers(CLASSES, size=len(OWNER))
PERSONAL = "head.*"
LAST_DIGITS = 1e-6  # float32 has 1.2e-7; a handful of rounds add up a few of them


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 5)
        self.head = nn.Linear(5, CLASSES)
        with torch.no_grad():  # no seed: Flower's legacy loop runs clients in threads
            for parameter in self.parameters():
                values = torch.sin(torch.arange(float(parameter.numel())))
                parameter.copy_(0.5 * values.reshape(parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(x)))
        return scores


def loaders(context: Context) -> tuple[Any, None]:
    own = (user_of(context) == OWNER) & ~TEST
    rows = TensorDataset(torch.tensor(X[own], dtype=torch.float32), torch.tensor(LABELS[own]))
    return DataLoader(rows, batch_size=BATCH), None


def legacy_network_client(context: Context) -> Client:
    train, test = loaders(context)
    learner = torch_learner(Net(), PERSONAL, train, test, user=user_of(context))
    return PPSGDClient(learner, context).to_client()


@pytest.mark.parametrize("case", CASES)
def test_a_network_gets_the_same_w_by_messages_and_by_the_legacy_loop(case: str) -> None:
    release, _ = CASES[case]
    initial = shared_arrays(Net(), PERSONAL)
    w = by_messages(release, torch_client(Net, PERSONAL, loaders), initial)
    legacy = by_legacy(release, ClientApp(client_fn=legacy_network_client), initial)
    assert np.linalg.norm(w - flat(initial)) > 0.01
    np.testing.assert_allclose(legacy, w, rtol=0, atol=LAST_DIGITS)


def test_a_network_gets_the_same_w_from_both_engines_of_the_command(tmp_path: Path) -> None:
    """The paper's CNN on pictures of noise."""
    users = 4
    owner = np.repeat(np.arange(users), 4)
    pictures = tmp_path / "pictures.npz"
    np.savez(
        pictures,
        user=owner,
        x=SOURCE.random((len(owner), 28 * 28)),
        y=np.arange(len(owner)) % 10,
        test=np.arange(len(owner)) % 4 == 3,
    )
    network = {"model": "cnn", "task": "classification", "rate": 0.5, "rounds": 2, "delta": 1e-3}
    settings = {**SETTINGS, **network}
    w = by_command(tmp_path, "process", pictures, settings)
    as_cohort = by_command(tmp_path, "cohort", pictures, settings)
    np.testing.assert_allclose(as_cohort, w, rtol=0, atol=LAST_DIGITS)
