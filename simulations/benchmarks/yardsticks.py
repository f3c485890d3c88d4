"""Algorithm 3 as a plain loop, one setting at a time: the cohort engine is measured against it."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import nn

from flwr_ppsgd import Ledger, Release, Steps
from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.lab.engine import EngineSetting
from flwr_ppsgd.lab.population import FinitePopulation
from flwr_ppsgd.lab.synthetic import Synthetic

Draw: TypeAlias = Callable[[int], tuple[NDArray[Any], NDArray[Any]]]  # a user's minibatch

STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.2, 1.5, 1.8)
ALPHAS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, math.inf)
DELTA = 1e-4


def settings(release: Release, steps: tuple[float, ...]) -> list[EngineSetting]:
    """The paper's grid at one noise level."""
    pairs = itertools.product(ALPHAS, steps)
    return [EngineSetting(release, Steps.from_ratio(step, alpha)) for alpha, step in pairs]


def plain_loop(draw: Draw, shape: tuple[int, int], setting: EngineSetting) -> Iterator[float]:
    """Rounds without end for the squared loss; yields ε after each."""
    release = setting.release
    steps = setting.steps
    users = release.cohort.population
    source = np.random.default_rng(0)
    ledger = Ledger(DELTA)
    w = np.zeros(shape)
    thetas = np.zeros((users, *shape))  # users × d × K
    while True:
        total = np.zeros(shape)
        for user in release.cohort.members(source.random(users)):
            x, y = draw(user)
            residual = x @ (w + thetas[user]) - y
            gradient = x.T @ residual / len(x)
            thetas[user] -= steps.personal * gradient
            total += gradient / max(1.0, np.linalg.norm(gradient) / release.clip_norm)
        noise = source.normal(0, release.noise_std, shape)
        w -= steps.shared * (total + noise) / release.denominator
        ledger = ledger.record(release)
        yield ledger.quick_epsilon()


def whole_cohort_loop(problem: Synthetic, batch: int, setting: EngineSetting) -> Iterator[float]:
    """The same for the synthetic problem, everyone in every round: all users at once, samples
    drawn in one call."""
    release = setting.release
    steps = setting.steps
    source = np.random.default_rng(0)
    ledger = Ledger(DELTA)
    users, d = problem.optima.shape
    w = np.zeros(d)
    thetas = np.zeros((users, d))
    while True:
        x, y = _synthetic_samples(problem, batch, source)
        residual = np.einsum("umd,ud->um", x, w + thetas) - y
        gradients = np.einsum("umd,um->ud", x, residual) / batch
        thetas -= steps.personal * gradients
        lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
        clipped = gradients / np.maximum(1.0, lengths / release.clip_norm)
        noise = source.normal(0, release.noise_std, d)
        noisy = clipped.sum(axis=0) + noise
        w = w - steps.shared * noisy / release.denominator
        ledger = ledger.record(release)
        yield ledger.quick_epsilon()


def _synthetic_samples(
    problem: Synthetic,
    batch: int,
    source: np.random.Generator,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """x (users × m × d) and y (users × m) of everyone."""
    users, d = problem.optima.shape
    spread = np.sqrt(problem.variances)
    x = source.normal(size=(users, batch, d)) * spread
    errors = source.normal(0, 0.01, (users, batch))
    y = np.einsum("umd,ud->um", x, problem.optima) + errors
    return x, y


def from_table(table: FinitePopulation) -> Draw:
    """Rows drawn anew in each round, made dense if they are sparse."""
    source = np.random.default_rng(1)

    def draw(user: int) -> tuple[NDArray[Any], NDArray[Any]]:
        places = source.integers(table.sizes[user], size=table.batch_size)
        own = table.offsets[user] + places
        x = table.x[own]
        if sparse.issparse(x):
            x = x.toarray()
        return x, table.y[own]

    return draw


def random_table(users: int, samples: int, features: int, outputs: int) -> FinitePopulation:
    """Random rows, one class each; ``samples`` is the number of rows per user."""
    source = np.random.default_rng(2)
    rows = users * samples
    x = source.normal(size=(rows, features)).astype(np.float32)
    classes = source.integers(outputs, size=rows)
    y = np.eye(outputs)[classes]
    offsets = np.arange(users + 1) * samples
    return FinitePopulation(x, y, offsets, batch_size=10, seed=1)


def bags_of_words(
    users: int, samples: int, words: int, tags: int, length: int = 40
) -> FinitePopulation:
    """Documents of ``length`` words with the frequencies of natural text (Zipf), each with about
    two tags; ``samples`` is the number of documents per user."""
    source = np.random.default_rng(3)
    rows = users * samples
    frequency = 1 / np.arange(1, words + 1)
    probabilities = frequency / frequency.sum()
    chosen = source.choice(words, size=rows * length, p=probabilities)
    values = np.full(rows * length, 1 / length)
    ends = np.arange(rows + 1) * length
    x = sparse.csr_array((values, chosen, ends), (rows, words))
    x.sum_duplicates()
    y = (source.random((rows, tags)) < 2 / tags).astype(float)
    offsets = np.arange(users + 1) * samples
    return FinitePopulation(x, y, offsets, batch_size=10, seed=1)


def autograd_loop(
    module: nn.Module,
    draws: Iterator[Any],
    setting: EngineSetting,
    personal: str,
) -> Iterator[float]:
    """A network, one user after the other: autograd, clip, step θ. Rounds without end; yields the
    norm of the last gradient.

    Args:
        module: the network, which is changed.
        draws: (x, y) of one minibatch after the other.
        setting: what is trained.
        personal: the name of the parameter that is θ.
    """
    release = setting.release
    source = np.random.default_rng(0)
    shared = dict(module.named_parameters())
    theta = shared.pop(personal)
    thetas: dict[int, torch.Tensor] = {}
    norm = 0.0
    while True:
        total = [torch.zeros_like(value) for value in shared.values()]
        uniforms = source.random(release.cohort.population)
        for user in release.cohort.members(uniforms).tolist():
            with torch.no_grad():
                theta.copy_(thetas.setdefault(user, torch.zeros_like(theta)))
            *gradients, g_theta = _gradients(module, next(draws), [*shared.values(), theta])
            thetas[user] = thetas[user] - setting.steps.personal * g_theta
            norm = _norm(gradients)
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_.add_(gradient / max(1.0, norm / release.clip_norm))
        _descend(list(shared.values()), total, setting)
        yield norm


def _gradients(
    module: nn.Module,
    rows: tuple[Vector, Vector],
    parameters: list[nn.Parameter],
) -> tuple[torch.Tensor, ...]:
    x, y = rows
    prediction = module(torch.from_numpy(x))
    loss = nn.functional.cross_entropy(prediction, torch.from_numpy(y))
    return torch.autograd.grad(loss, parameters)


def _norm(gradients: list[torch.Tensor]) -> float:
    """The norm of all gradients as one vector."""
    squares = torch.stack([(gradient**2).sum() for gradient in gradients])
    return math.sqrt(squares.sum().item())


def _descend(
    shared: list[nn.Parameter],
    total: list[torch.Tensor],
    setting: EngineSetting,
) -> None:
    """w −= s_w·(total + noise)/D."""
    release = setting.release
    with torch.no_grad():
        for value, sum_ in zip(shared, total, strict=True):
            noisy = sum_ + release.noise_std * torch.randn_like(sum_)
            value.sub_(setting.steps.shared * noisy / release.denominator)


def small_cnn() -> nn.Module:
    """The paper's representation: 26,000 parameters with its head."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
    )


def take(rounds: int, turns: Iterator[float]) -> None:
    """Run this number of rounds of a loop."""
    for _ in itertools.islice(turns, rounds):
        pass
