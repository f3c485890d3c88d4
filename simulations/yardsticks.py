"""Algorithm 3 as a plain loop, one setting at a time: what the cohort engine is measured against."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import nn

from flwr_ppsgd import Ledger, Release, Steps
from flwr_ppsgd.data.synthetic import Synthetic
from flwr_ppsgd.simulation.batches import Table
from flwr_ppsgd.simulation.linear import Setting

Draw: TypeAlias = Callable[[int], tuple[NDArray[Any], NDArray[Any]]]  # a user's minibatch
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.2, 1.5, 1.8)
ALPHAS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))


def settings(release: Release, steps: tuple[float, ...]) -> list[Setting]:
    """The paper's grid at one noise level."""
    return [Setting(release, Steps.from_ratio(step, a)) for a in ALPHAS for step in steps]


def plain_loop(draw: Draw, shape: tuple[int, int], setting: Setting) -> Iterator[float]:
    """Rounds without end for the squared loss; gives ε after each."""
    release, steps, source = setting.release, setting.steps, np.random.default_rng(0)
    users = release.cohort.population
    w, thetas, ledger = np.zeros(shape), np.zeros((users, *shape)), Ledger(1e-4)
    while True:
        total = np.zeros(shape)
        for user in release.cohort.members(source.random(users)):
            x, y = draw(user)
            gradient = x.T @ (x @ (w + thetas[user]) - y) / len(x)
            thetas[user] -= steps.personal * gradient
            total += gradient / max(1.0, np.linalg.norm(gradient) / release.clip_norm)
        noise = source.normal(0, release.noise_std, shape)
        w -= steps.shared * (total + noise) / release.denominator
        ledger = ledger.record(release)
        yield ledger.quick_epsilon()


def whole_cohort_loop(problem: Synthetic, batch: int, setting: Setting) -> Iterator[float]:
    """The same for the synthetic problem, everyone in every round: all users at once, samples drawn in one call."""
    release, steps, source = setting.release, setting.steps, np.random.default_rng(0)
    users, d = problem.optima.shape
    w, thetas, ledger, spread = np.zeros(d), np.zeros((users, d)), Ledger(1e-4), np.sqrt(problem.variances)
    while True:
        x = source.normal(size=(users, batch, d)) * spread
        y = np.einsum("umd,ud->um", x, problem.optima) + source.normal(0, 0.01, (users, batch))
        residual = np.einsum("umd,ud->um", x, w + thetas) - y
        gradients = np.einsum("umd,um->ud", x, residual) / batch
        thetas -= steps.personal * gradients
        lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
        total = (gradients / np.maximum(1.0, lengths / release.clip_norm)).sum(axis=0)
        w = w - steps.shared * (total + source.normal(0, release.noise_std, d)) / release.denominator
        ledger = ledger.record(release)
        yield ledger.quick_epsilon()


def from_table(table: Table) -> Draw:
    """Rows drawn anew in each round, made dense where they are sparse."""
    source = np.random.default_rng(1)

    def draw(user: int) -> tuple[NDArray[Any], NDArray[Any]]:
        own = table.offsets[user] + source.integers(table.sizes[user], size=table.batch_size)
        x = table.x[own]
        return (x.toarray() if sparse.issparse(x) else x), table.y[own]

    return draw


def random_table(users: int, samples: int, features: int, outputs: int) -> Table:
    """Random rows, one class each."""
    source = np.random.default_rng(2)
    x = source.normal(size=(users * samples, features)).astype(np.float32)
    y = np.eye(outputs)[source.integers(outputs, size=len(x))]
    return Table(x, y, np.arange(users + 1) * samples, batch_size=10, seed=1)


def bags_of_words(users: int, samples: int, words: int, tags: int, length: int = 40) -> Table:
    """Documents of ``length`` words with the frequencies of natural text (Zipf), each with about two tags."""
    source, rows = np.random.default_rng(3), users * samples
    frequency = 1 / np.arange(1, words + 1)
    chosen = source.choice(words, size=rows * length, p=frequency / frequency.sum())
    x = sparse.csr_array((np.full(rows * length, 1 / length), chosen, np.arange(rows + 1) * length), (rows, words))
    x.sum_duplicates()
    y = (source.random((rows, tags)) < 2 / tags).astype(float)
    return Table(x, y, np.arange(users + 1) * samples, batch_size=10, seed=1)


def autograd_loop(module: nn.Module, draws: Iterator[Any], setting: Setting, personal: str) -> Iterator[float]:
    """A network, one user after the other: autograd, clip, step θ; gives the norm of the last gradient."""
    release, steps, source = setting.release, setting.steps, np.random.default_rng(0)
    parameters = dict(module.named_parameters())
    own = parameters.pop(personal)
    thetas: dict[int, torch.Tensor] = {}
    while True:
        total = [torch.zeros_like(value) for value in parameters.values()]
        for user in release.cohort.members(source.random(release.cohort.population)).tolist():
            x, y = next(draws)
            with torch.no_grad():
                own.copy_(thetas.setdefault(user, torch.zeros_like(own)))
            loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
            *gradients, g_theta = torch.autograd.grad(loss, [*parameters.values(), own])
            thetas[user] = thetas[user] - steps.personal * g_theta
            norm = torch.sqrt(sum((g**2).sum() for g in gradients)).item()  # type: ignore[arg-type]
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_.add_(gradient / max(1.0, norm / release.clip_norm))
        with torch.no_grad():
            for value, sum_ in zip(parameters.values(), total, strict=True):
                noisy = sum_ + release.noise_std * torch.randn_like(sum_)
                value.sub_(steps.shared * noisy / release.denominator)
        yield norm


def small_cnn() -> nn.Module:
    """The paper's representation: 26,000 parameters with its head."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(),
    )  # fmt: skip


def take(rounds: int, turns: Iterator[float]) -> None:
    for _ in itertools.islice(turns, rounds):
        pass
