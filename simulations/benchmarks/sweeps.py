"""The cohort engine: one setting, many, and how near it is to what bounds it."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike
from scipy import sparse

from flwr_ppsgd import Poisson, Release, Steps
from flwr_ppsgd.lab.data.synthetic import Synthetic
from flwr_ppsgd.lab.engine import Setting
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.population import Fresh, Table
from flwr_ppsgd.noise import Coins
from simulations.benchmarks.measuring import Comparison, seconds, show, show_against_loop
from simulations.benchmarks.networks import network, paper_network_share
from simulations.benchmarks.paper_grids import grids
from simulations.benchmarks.workload import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    USERS,
    against,
    ledgers,
    linear_table,
    several,
    warmed,
)
from simulations.yardsticks import (
    STEPS,
    bags_of_words,
    from_table,
    plain_loop,
    settings,
    take,
    whole_cohort_loop,
)

USERS_PER_ROUND = 10
HOT = 2  # rows that stay in the cache


def show_sweeps() -> None:
    print(
        "\nThe cohort engine in setting-rounds per CPU second, over those of a plain loop, one "
        "setting at a time:"
    )
    for name, comparison, least in COHORTS:
        show_against_loop(name, comparison(), least)
    show_words_bound()
    name = "   for orientation, the paper's CNN: share of sgemm's speed"
    print(f"{name:66s} {paper_network_share():9.3g}", flush=True)
    minutes = sum(grid.seconds for grid in grids()) / 60
    show("f. the paper's three linear grids at its sizes, in core-minutes", minutes, at_most=60)


def one_setting() -> Comparison:
    """ε after every round, on both sides."""
    release = Release(Poisson(USERS, rate=0.01), clip_norm=10.0, noise_multiplier=1.0)
    setting = Setting(release, Steps(0.001, 0.001))
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
    release = Release(Poisson(USERS, rate=0.01), clip_norm=10.0, noise_multiplier=1.0)
    table = linear_table()
    grid = settings(release, (1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01))
    loop = plain_loop(from_table(table), (FEATURES, CLASSES), grid[20])
    engine = warmed(LinearEngine(table, grid, seed=1))
    return against(loop, engine, settings=len(grid), repetitions=20, rounds=20)


def synthetic_sweep() -> Comparison:
    problem = Synthetic.draw(USERS, 100, seed=1)
    release = Release(Poisson(USERS, rate=1.0), clip_norm=10.0, noise_multiplier=10.0)
    grid = settings(release, STEPS)
    loop = whole_cohort_loop(problem, BATCH, grid[50])
    engine = LinearEngine(Fresh(problem, BATCH), grid, seed=1)
    return against(loop, engine, settings=len(grid), repetitions=12, rounds=5)


def words_sweep(dtype: DTypeLike = np.float64) -> Comparison:
    release = Release(Poisson(500, rate=0.02), clip_norm=0.01, noise_multiplier=1.0)
    table = bags_of_words(500, SAMPLES, 5000, 80)
    grid = settings(release, (2.0, 5.0, 10.0, 20.0))
    loop = plain_loop(from_table(table), (5000, 80), grid[10])
    take(100, loop)
    engine = warmed(LinearEngine(table, grid, seed=1, dtype=dtype))
    return against(loop, engine, settings=len(grid), repetitions=12, rounds=5)


def narrow_words_sweep() -> Comparison:
    """In the precision of ``figure-1b``."""
    return words_sweep(np.float32)


def show_words_bound() -> None:
    """What a round of the sparse sweep in float64 cannot do without, and how near it is to that."""
    turns = words_turns()
    memory = [(turn.moving + turn.normals) / turn.round for turn in turns]
    everything = [turn.needed / turn.round for turn in turns]
    show(
        "f. the sparse sweep: what memory and secret normals need / a round",
        statistics.median(memory),
        at_least=0.4,
    )
    name = "   the same with the arithmetic of scipy and BLAS, data in cache"
    print(f"{name:66s} {statistics.median(everything):9.3g}")
    for field in dataclasses.fields(WordsTurn):
        milliseconds = 1000 * statistics.median(getattr(turn, field.name) for turn in turns)
        name = f"   milliseconds in float64: {field.name}"
        print(f"{name:66s} {milliseconds:9.3g}", flush=True)


@dataclasses.dataclass(frozen=True)
class WordsTurn:
    """CPU seconds of one round of the sparse sweep, and of its parts by themselves.

    Args:
        round: all of it.
        normals: one secret normal for each coordinate of w.
        moving: the rows of V and θ that it must read or write, at the speed of a large copy.
        shared: x V and xᵀR by scipy, on rows that stay in the cache.
        personal: the scores of θ by BLAS, on a matrix that stays in the cache.
    """

    round: float
    normals: float
    moving: float
    shared: float
    personal: float

    @property
    def needed(self) -> float:
        return self.normals + self.moving + self.shared + self.personal


def words_turns(rounds: int = 5, repetitions: int = 8) -> list[WordsTurn]:
    release = Release(Poisson(500, rate=0.02), clip_norm=0.01, noise_multiplier=1.0)
    table = bags_of_words(500, SAMPLES, 5000, 80)
    grid = settings(release, (2.0, 5.0, 10.0, 20.0))
    engine = warmed(LinearEngine(table, grid, seed=1))
    columns = 32 * 80  # one α has no θ, another has no w
    must_move = words_bytes(table, columns)
    source = np.ones(10**7)
    target = np.ones(10**7)
    hot_rows = hot_words(table)
    hot_v = np.ones((HOT, columns))
    gram_rows = np.ones((BATCH, SAMPLES))
    coefficients = np.ones((SAMPLES, columns))
    turns = []
    for _ in range(repetitions):
        copying = seconds(lambda: np.copyto(target, source))
        turn = WordsTurn(
            round=seconds(lambda: several(engine, rounds)) / rounds,
            normals=seconds(lambda: Coins.secret().normals(5000 * 80)),
            moving=must_move * copying / (2 * source.nbytes),
            shared=2 * seconds(lambda: hot_rows @ hot_v),
            personal=seconds(lambda: [gram_rows @ coefficients for _ in range(USERS_PER_ROUND)]),
        )
        turns.append(turn)
    return turns


def hot_words(table: Table) -> sparse.csr_array:
    """The texts of ten users with as many entries as they have, all of them of a few words."""
    rows = np.arange(USERS_PER_ROUND * BATCH)
    texts = table.x[rows]
    assert isinstance(texts, sparse.csr_array)
    words = texts.indices % HOT
    return sparse.csr_array((texts.data, words, texts.indptr), (len(rows), HOT))


def words_bytes(table: Table, columns: int) -> float:
    """Bytes that a round of ten users cannot avoid to read or write.

    The rows of V for the words of the cohort: read for scores, read and written by the step. P_i
    of each user: read twice and written. Σ_t n_t: read and written.
    """
    users = np.arange(0, len(table), len(table) // USERS_PER_ROUND)
    batch = table.batch(users, np.ones(len(users), dtype=np.intp), np.dtype(np.float64))
    _, columns_with_entries = batch.x.nonzero()
    words = len(np.unique(columns_with_entries))
    own_rows = 3 * len(users) * SAMPLES
    noise = 2 * table.features * table.outputs
    return 8.0 * (3 * words * columns + own_rows * columns + noise)


COHORTS: tuple[tuple[str, Callable[[], Comparison], float], ...] = (
    ("f. one setting, 784×10, Q=10, ε every round", one_setting, 1.5),
    ("f. 63 settings, the same", linear_sweep, 8),
    ("f. 99 settings, synthetic, N=1000, d=100, Q=N", synthetic_sweep, 15),
    ("f. 36 settings, sparse 5000×80, N=500, Q=10, float32", narrow_words_sweep, 100),
    ("f. the same in float64", words_sweep, 100),
    ("f. CNN with additive head, Q=10", network, 1.2),
    ("f. 8 settings, the same", functools.partial(network, 8), 1.2),
)
