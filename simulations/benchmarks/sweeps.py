"""The cohort engine: setting-rounds per CPU second, over those of a plain loop."""

import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch

from flwr_ppsgd import Poisson, Release, Steps
from flwr_ppsgd.lab.engine import EngineSetting
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.network_engine import NetworkEngine
from flwr_ppsgd.lab.population import FreshPopulation
from flwr_ppsgd.lab.synthetic import Synthetic
from flwr_ppsgd.learner import Minibatches, generator
from flwr_ppsgd.models.torch_model import AdditiveHead
from simulations.benchmarks.measuring import Comparison, show_against_loop
from simulations.benchmarks.workload import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    USERS,
    against,
    ledgers,
    linear_table,
    warmed,
)
from simulations.benchmarks.yardsticks import (
    STEPS,
    autograd_loop,
    bags_of_words,
    from_table,
    plain_loop,
    settings,
    small_cnn,
    take,
    whole_cohort_loop,
)


def show_sweeps() -> None:
    """One setting, many, dense and sparse, and networks."""
    print("\nThe cohort engine over a plain loop, one setting at a time:")
    for name, comparison, least in COHORTS:
        show_against_loop(name, comparison(), least)


def one_setting() -> Comparison:
    """ε after every round, on both sides."""
    release = Release(Poisson(USERS, rate=0.01), clip_norm=10.0, noise_multiplier=1.0)
    setting = EngineSetting(release, Steps(0.001, 0.001))
    table = linear_table()
    loop = plain_loop(from_table(table), (FEATURES, CLASSES), setting)
    engine = warmed(LinearEngine(table, [setting], seed=1))
    growing = ledgers(release)

    def rounds() -> None:
        for ledger in itertools.islice(growing, 50):
            engine.advance()
            ledger.quick_epsilon()

    return Comparison(lambda: take(50, loop), rounds, settings=1, repetitions=40, rounds=50)


def linear_sweep() -> Comparison:
    """The paper's grid at one noise level."""
    release = Release(Poisson(USERS, rate=0.01), clip_norm=10.0, noise_multiplier=1.0)
    table = linear_table()
    grid = settings(release, (1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01))
    loop = plain_loop(from_table(table), (FEATURES, CLASSES), grid[20])
    engine = warmed(LinearEngine(table, grid, seed=1))
    return against(loop, engine, settings=len(grid), repetitions=20, rounds=20)


def synthetic_sweep() -> Comparison:
    """Figure 1a: everyone in every round, on fresh samples."""
    problem = Synthetic.draw(USERS, 100, seed=1)
    release = Release(Poisson(USERS, rate=1.0), clip_norm=10.0, noise_multiplier=10.0)
    grid = settings(release, STEPS)
    loop = whole_cohort_loop(problem, BATCH, grid[50])
    engine = LinearEngine(FreshPopulation(problem, BATCH), grid, seed=1)
    return against(loop, engine, settings=len(grid), repetitions=12, rounds=5)


def words_sweep() -> Comparison:
    """Figure 1b, in its precision."""
    release = Release(Poisson(500, rate=0.02), clip_norm=0.01, noise_multiplier=1.0)
    table = bags_of_words(500, SAMPLES, 5000, 80)
    grid = settings(release, (2.0, 5.0, 10.0, 20.0))
    loop = plain_loop(from_table(table), (5000, 80), grid[10])
    take(100, loop)
    engine = warmed(LinearEngine(table, grid, seed=1, dtype=np.float32))
    return against(loop, engine, settings=len(grid), repetitions=12, rounds=5)


def network(count: int = 1) -> Comparison:
    """A cohort's gradients by ``torch.func.vmap``, against a loop over users."""
    torch.set_num_threads(1)
    source = generator("images")
    x = source.normal(size=(SAMPLES, 1, 28, 28)).astype(np.float32)
    y = source.integers(10, size=SAMPLES)
    batches = [Minibatches(x, y, BATCH, seed=1, user=user) for user in range(50)]
    model = AdditiveHead(small_cnn(), num_features=32, num_outputs=10)
    release = Release(Poisson(50, rate=0.2), clip_norm=0.1, noise_multiplier=1.0)
    setting = EngineSetting(release, Steps(0.1, 0.1))
    engine = NetworkEngine(model, batches, [setting] * count, seed=1)
    module = model.module_with(model.initial_w()).train()
    draws = map(batches[0], itertools.count(1))
    loop = autograd_loop(module, draws, setting, personal="head.weight")
    return against(loop, engine, settings=count, repetitions=16, rounds=10)


COHORTS: tuple[tuple[str, Callable[[], Comparison], float], ...] = (
    ("one setting, 784×10, Q=10, ε every round", one_setting, 1),
    ("63 settings, the same", linear_sweep, 8),
    ("99 settings, synthetic, N=1000, d=100, Q=N", synthetic_sweep, 8),
    ("36 settings, sparse 5000×80, N=500, Q=10, float32", words_sweep, 8),
    ("CNN with additive head, Q=10", network, 1.2),
    ("8 settings, the same", functools.partial(network, 8), 1.2),
)
