"""One ClientApp under FedAvg, Flower's DP wrapper and PPSGD.auto, at the same ε. One table, one
picture.

What changes between runs is the strategy alone. Everybody has few rows and a task that is partly
everyone's and partly their own, so that both the shared and the personal part matter. Each trained
w is measured twice: alone, as it is published, and in the personal model that each user makes
around it from own rows, which is free of charge for every strategy. The wrapper needs a clip norm
C, and is shown with three; PPSGD.auto has nothing to choose.
"""

import argparse
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from matplotlib import pyplot as plt

from flwr_ppsgd import (
    PPSGD,
    AdditiveLinear,
    Minibatches,
    Poisson,
    calibrate_noise,
    client_app,
    personalize,
)
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.cli import console
from flwr_ppsgd.lab.figures import COLOURS
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.wire import SIZE, UNIT, VARIANCE

USERS = 150
EPSILON = 1.0
DELTA = 1e-4
ROUNDS = 50  # of everybody but PPSGD.auto, which needs fewer
FEATURES = 20
ROWS = 15  # of a user, to learn from
TEST_ROWS = 50
COMMON = 1.0  # the length of what is everyone's
OWN = 0.7  # the length of what is a user's own
NOISE = 0.5  # in the targets
LOCAL_STEP = 0.1
LOCAL_STEPS = 5
CLIP_NORMS = (0.1, 1.0, 10.0)  # of the wrapper
CUT_OFF = 1.6  # of the picture, in units of the largest error of personal models
OUTSIDE = "Measured on users' own test rows: outside the guarantee."


@functools.cache
def learner(user: int) -> AdditiveLinear:
    """One user's rows: y = (v + u_i)ᵀx + noise."""
    v = _direction(np.random.default_rng(1), COMMON)
    coins = np.random.default_rng((2, user))
    truth = v + _direction(coins, OWN)
    x = coins.standard_normal((ROWS + TEST_ROWS, FEATURES))
    y = x @ truth + NOISE * coins.standard_normal(len(x))
    batches = Minibatches(x[:ROWS], y[:ROWS], ROWS, seed=0, user=user)
    return AdditiveLinear(batches, FEATURES, test=(x[ROWS:], y[ROWS:]))


def _direction(coins: np.random.Generator, length: float) -> Vector:
    drawn = coins.standard_normal(FEATURES)
    return np.asarray(length * drawn / np.linalg.norm(drawn))


def learner_for(context: Context) -> AdditiveLinear:
    """The learner of one node."""
    return learner(int(context.node_config["partition-id"]))


app = client_app(learner_for, local_step=LOCAL_STEP, local_steps=LOCAL_STEPS)


@dataclass(frozen=True)
class Outcome:
    """The mean error of users, RMSE on own test rows.

    Args:
        label: the strategy.
        alone: of w alone; None if there is none.
        personal: of the personal model that each user makes around it.
    """

    label: str
    alone: float | None
    personal: float


def measured(
    label: str, w: Vector, users: int, *, auto: PPSGD | None = None, noise: float = 0.0
) -> Outcome:
    """How users fare with a published w.

    Args:
        label: the strategy.
        w: what it published.
        users: how many there are.
        auto: the strategy if it is ``PPSGD.auto``, whose w is in units of each user's own targets.
        noise: the variance of one round's noise in w, as ``auto`` publishes it; for any other one.
    """
    published = {"w": w, VARIANCE: np.array([noise]), UNIT: np.ones(()), SIZE: np.ones(())}
    if auto is not None:
        published = auto.published(ArrayRecord([w]))
    alone = []
    personal = []
    for user in range(users):
        own = learner(user)
        around = personalize(published, own).mixture
        assert around is not None
        raw = w * around.unit
        if auto is None:
            raw = w
            around = personalize({**published, "w": w / around.unit}, own).mixture
            assert around is not None
        alone.append(_error(own.evaluate(raw, own.initial_theta())))
        personal.append(_error(own.measure(around)))
    shared = float(np.mean(alone)) if w.any() else None
    return Outcome(label, shared, float(np.mean(personal)))


def _error(measures: Mapping[str, float]) -> float:
    return float(np.sqrt(2 * measures["loss"]))  # the loss is half the square


def trained(strategy: Strategy, users: int, rounds: int | None = None) -> Vector:
    """w after all rounds; as many as ``PPSGD.auto`` plans unless given."""
    start = ArrayRecord([np.zeros(FEATURES)])
    grid = InProcessGrid(app, users)
    if rounds is None:
        result = strategy.start(grid, start)
    else:
        result = strategy.start(grid, start, num_rounds=rounds)
    (w,) = result.arrays.to_numpy_ndarrays()
    return np.asarray(w, dtype=np.float64)


def wrapped(
    epsilon: float, clip_norm: float, users: int, rounds: int
) -> DifferentialPrivacyServerSideFixedClipping:
    """FedAvg in Flower's DP wrapper with the noise that all rounds need for ε.

    Everybody takes part and has the same number of rows, so that one user moves the mean by at most
    C/N, which is what the wrapper's noise is a multiple of.
    """
    everyone = Poisson(users, 1.0)
    z = calibrate_noise(epsilon=epsilon, delta=DELTA, cohort=everyone, rounds=rounds)
    return DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0),
        noise_multiplier=z,
        clipping_norm=clip_norm,
        num_sampled_clients=users,
    )


def outcomes(epsilon: float, users: int, rounds: int) -> tuple[list[Outcome], PPSGD]:
    """Everything that is compared, and the strategy that knows what it guarantees."""
    at = f"ε = {epsilon:g}"
    found = [measured("local learning", np.zeros(FEATURES), users)]
    plain = trained(FedAvg(fraction_evaluate=0.0), users, rounds)
    found.append(measured("FedAvg, not private", plain, users))
    for clip_norm in CLIP_NORMS:
        strategy = wrapped(epsilon, clip_norm, users, rounds)
        std = strategy.noise_multiplier * clip_norm / users
        w = trained(strategy, users, rounds)
        label = f"Flower's DP wrapper, C = {clip_norm:g}, {at}"
        found.append(measured(label, w, users, noise=std**2))
    ppsgd = PPSGD.auto(population=users, epsilon=epsilon, delta=DELTA, task="regression")
    found.append(measured(f"PPSGD.auto, {at}", trained(ppsgd, users), users, auto=ppsgd))
    return found, ppsgd


def table(found: Sequence[Outcome]) -> str:
    """As text."""
    lines = [f"{'mean RMSE of users':38s} {'w alone':>9s} {'personal':>9s}"]
    for outcome in found:
        alone = "-" if outcome.alone is None else f"{outcome.alone:.3f}"
        lines.append(f"{outcome.label:38s} {alone:>9s} {outcome.personal:9.3f}")
    return "\n".join(lines)


def draw(found: Sequence[Outcome], path: Path) -> None:
    """A bar for each w, and one for the personal models on top of it."""
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    places = np.arange(len(found))[::-1]
    shared = [np.nan if outcome.alone is None else outcome.alone for outcome in found]
    personal = [outcome.personal for outcome in found]
    limit = CUT_OFF * max(personal)
    cut = np.minimum(shared, limit)  # a bar may be many times as long
    bars = axes.barh(places + 0.2, cut, 0.36, color="0.7", label="w alone")
    labels = ["" if np.isnan(value) else f"{value:.3f}" for value in shared]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    bars = axes.barh(places - 0.2, personal, 0.36, color=COLOURS[0], label="personal, around w")
    axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    axes.set_yticks(places, [outcome.label for outcome in found])
    axes.set(xlabel="mean RMSE of users on own test rows (lower is better)")
    axes.set_title("The same clients under every strategy")
    axes.margins(x=0.12)
    axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.16), ncols=2, fontsize=8)
    figure.supxlabel(OUTSIDE, fontsize=8, color="0.3")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Run, print and draw everything."""
    parser = argparse.ArgumentParser(prog="python -m simulations.swap")
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--picture", type=Path, default=Path("runs") / "swap.png")
    options = parser.parse_args(arguments)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found, ppsgd = outcomes(options.epsilon, options.users, options.rounds)
    console.print(table(found), highlight=False)
    statement, *_ = ppsgd.privacy_statement().splitlines()
    console.print(f"PPSGD: {statement}", highlight=False)
    console.print(OUTSIDE)
    draw(found, options.picture)
    console.print(f"Picture: {options.picture}")
    return found


if __name__ == "__main__":
    main()
