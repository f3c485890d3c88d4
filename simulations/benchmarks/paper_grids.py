"""How long the paper's three linear grids take at the paper's own sizes.

Figures 1a, 1b and 1c as they ship, on rows of the paper's form: 1,000 users with 101 pictures each,
20 passes; 500 users with 300 to 500 texts each, one pass. The rows are random, since time does not
depend on what they say. 1a and 1c are from a sample of rounds; of 1b, whose rounds take longer as
users have drawn more rows, one block of settings is run as a whole.
``python -m simulations.benchmarks.paper_grids``
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flwr_ppsgd.lab.block import Plan, plan, setting_of
from flwr_ppsgd.lab.engine import reported_rounds
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.lab.population import DType, Population, Table
from flwr_ppsgd.lab.sweep import Sweep
from simulations.benchmarks.measuring import seconds
from simulations.benchmarks.workload import several
from simulations.yardsticks import bags_of_words

MEMORY = 8 * 10**9
VISITS = 3  # on average, until nearly everyone's first is over: that one touches fresh memory
SAMPLE = 40  # rounds after that
LENGTH = 40  # words in a text


@dataclass(frozen=True)
class Grid:
    """What one figure takes.

    Args:
        name: of the experiment that ships.
        settings: the number of trainings.
        rounds: of each of them.
        seconds: of CPU for all of it.
    """

    name: str
    settings: int
    rounds: int
    seconds: float

    def __str__(self) -> str:
        trained = self.settings * self.rounds
        return (
            f"{self.name}: {self.settings} settings × {self.rounds:,} rounds, "
            f"{trained / self.seconds:,.0f} setting-rounds per second, "
            f"{self.seconds / 60:.1f} core-minutes"
        )


def main() -> None:
    found = list(grids())
    for grid in found:
        print(grid, flush=True)
    print(f"all three: {sum(grid.seconds for grid in found) / 60:.1f} core-minutes")


def grids() -> Iterator[Grid]:
    """The three figures."""
    with tempfile.TemporaryDirectory() as directory:
        pictures = Path(directory) / "pictures.npz"
        texts = Path(directory) / "texts.npz"
        np.savez(pictures, **random_pictures())
        np.savez(texts, **random_texts())
        yield timed("figure-1a", {})
        yield timed("figure-1b", {"data": str(texts)}, whole=True)
        yield timed("figure-1c", {"data": str(pictures)})


def timed(name: str, changes: dict[str, Any], *, whole: bool = False) -> Grid:
    """The first block of a figure, as if all were like it, and what blocks share once.

    Args:
        name: of the experiment that ships.
        changes: to its settings.
        whole: run the block, not a sample of its rounds.
    """
    sweep = Sweep.load(Path(name), changes)
    training = sweep.base.training
    planned = plan(sweep, MEMORY, jobs=1)
    engine = first_engine(sweep, planned)
    dtype = np.dtype(sweep.base.precision)
    shared = seconds(lambda: work_out_coordinates(engine.population, dtype))
    reports = reported_rounds(training.rounds, training.evaluate_every)
    if whole:
        block = seconds(lambda: run_all(engine, training.rounds, reports))
    else:
        early = int(VISITS / training.release().cohort.rate)
        block = sampled(engine, training.rounds, early, len(reports))
    settings = len(sweep.points())
    share = settings / len(planned.blocks[0])
    return Grid(name, settings, training.rounds, shared + share * block)


def work_out_coordinates(population: Population, dtype: DType) -> None:
    """What all blocks that one process runs have in common."""
    if isinstance(population, Table):
        for user in range(len(population)):
            population.coordinates(user, dtype)


def run_all(engine: LinearEngine, rounds: int, reports: list[int]) -> None:
    """All rounds and reports. No setting is dropped: on random rows some diverge."""
    for round_ in range(rounds + 1):
        if round_:
            engine.advance()
        if round_ in reports:
            engine.measures()


def sampled(engine: LinearEngine, rounds: int, early: int, reports: int) -> float:
    """Seconds of all rounds and reports, from early rounds, later rounds and one report."""
    early = min(rounds, early)
    beginning = seconds(lambda: several(engine, early))
    per_round = seconds(lambda: several(engine, SAMPLE)) / SAMPLE
    measuring = seconds(engine.measures)
    return beginning + (rounds - early) * per_round + reports * measuring


def first_engine(sweep: Sweep, planned: Plan) -> LinearEngine:
    points = planned.blocks[0]
    base = sweep.base
    settings = [setting_of(base, point) for point in points]
    engine = base.task.engine(settings, points[0].seed)
    assert isinstance(engine, LinearEngine)
    return engine


def random_pictures(users: int = 1000, train: int = 101, test: int = 12) -> dict[str, Any]:
    """In the form of a file of one's own: pictures of 784 pixels in ten classes."""
    source = np.random.default_rng(0)
    rows = users * (train + test)
    return {
        "user": np.repeat(np.arange(users), train + test),
        "x": source.integers(256, size=(rows, 784), dtype=np.uint8),
        "y": source.integers(10, size=rows),
        "test": np.tile(np.arange(train + test) >= train, users),
    }


def random_texts(users: int = 500, words: int = 5000, tags: int = 80) -> dict[str, Any]:
    """The same for bags of words with tags: 300 to 500 texts per user to train on, 10 to 100 to
    measure on."""
    source = np.random.default_rng(0)
    train = source.integers(300, 501, size=users)
    test = source.integers(10, 101, size=users)
    rows = int((train + test).sum())
    table = bags_of_words(1, rows, words, tags, LENGTH)
    texts: Any = table.x
    starts = np.cumsum(train + test) - (train + test)
    user = np.repeat(np.arange(users), train + test)
    within = np.arange(rows) - starts[user]
    _, tag_indices = table.y.nonzero()
    return {
        "user": user,
        "test": within >= train[user],
        "indptr": texts.indptr,
        "indices": texts.indices,
        "counts": np.rint(LENGTH * texts.data).astype(np.uint8),
        "tag_indptr": np.concatenate([[0], np.cumsum(table.y.sum(axis=1))]).astype(int),
        "tag_indices": tag_indices,
        "vocab": np.array([f"word{place}" for place in range(words)]),
        "tag_names": np.array([f"tag{place}" for place in range(tags)]),
    }


if __name__ == "__main__":
    main()
