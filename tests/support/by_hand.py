"""Rounds of the algorithm by the core's own functions, one user after the other."""

from collections.abc import Iterator, Sequence

import numpy as np

from flwr_ppsgd import Learner, Order
from flwr_ppsgd.algorithm import Vector, client_step
from flwr_ppsgd.lab.engine import EngineSetting
from flwr_ppsgd.noise import RandomStream
from tests.support.steps import noisy_step


def by_hand(
    learners: Sequence[Learner], setting: EngineSetting, w: Vector, *, seed: int, rounds: int
) -> Iterator[tuple[Vector, list[Vector]]]:
    """(w, every θ) after each round."""
    release = setting.release
    steps = setting.steps
    thetas = [learner.initial_theta() for learner in learners]
    visits = [0] * len(learners)
    for round_ in range(1, rounds + 1):
        sent = []
        uniforms = RandomStream.insecure(seed, "cohort", round_).uniforms(len(learners))
        for user in release.cohort.members(uniforms).tolist():
            visits[user] += 1
            order = Order(
                round_,
                steps.personal,
                release.clip_norm,
                release.reduction,
                True,
                visit=visits[user],
            )
            g_w, g_theta = learners[user].gradients(w, thetas[user], order)
            message, thetas[user] = client_step(
                thetas[user], g_w, g_theta, release.clip_norm, steps.personal
            )
            sent.append(message)
        if steps.publishes:
            noise = release.noise_std * RandomStream.insecure(seed, "noise", round_).normals(len(w))
            w = noisy_step(w, sent, release, steps.shared, noise)
        yield w, list(thetas)


def close(ours: Vector, theirs: Vector, rel: float = 1e-9) -> None:
    """Equal up to this share of the largest number."""
    largest = max(float(np.abs(theirs).max()), 1e-12)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=rel * largest)
