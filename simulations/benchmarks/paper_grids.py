"""How long the paper's three linear grids take at the paper's own sizes, from a sample of rounds.

Figures 1a, 1b and 1c as they ship, on rows of the paper's form: 1,000 users with 101 pictures each,
20 passes; 500 users with 300 to 500 texts each, one pass. The rows are random, since time does not
depend on what they say. ``python -m simulations.benchmarks.paper_grids``
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flwr_ppsgd.experiments.blocks import Plan, plan, setting_of
from flwr_ppsgd.experiments.sweep import Sweep
from flwr_ppsgd.simulation.engine import Engine, reported_rounds
from simulations.benchmarks.measuring import seconds
from simulations.benchmarks.workload import several
from simulations.yardsticks import bags_of_words

MEMORY = 8 * 10**9
VISITS = 3  # on average, until nearly everyone's first is over: that one costs more
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
        yield timed("figure-1b", {"data": str(texts)})
        yield timed("figure-1c", {"data": str(pictures)})


def timed(name: str, changes: dict[str, Any]) -> Grid:
    """The first block of a figure for some rounds, and once all measures, as if they were all.

    The rounds of first visits, in which products of users' own rows are worked out, count once.
    """
    sweep = Sweep.load(Path(name), changes)
    rounds = sweep.base.training.rounds
    planned = plan(sweep, MEMORY, jobs=1)
    engine = first_engine(sweep, planned)
    early = min(rounds, int(VISITS / sweep.base.training.release().cohort.rate))
    beginning = seconds(lambda: several(engine, early))
    per_round = seconds(lambda: several(engine, SAMPLE)) / SAMPLE
    seconds(engine.measures)
    measuring = seconds(engine.measures)
    reports = len(reported_rounds(rounds, sweep.base.training.evaluate_every))
    settings = len(sweep.points())
    share = settings / len(planned.blocks[0])
    block = beginning + (rounds - early) * per_round + reports * measuring
    return Grid(name, settings, rounds, share * block)


def first_engine(sweep: Sweep, planned: Plan) -> Engine:
    points = planned.blocks[0]
    base = sweep.base
    settings = [setting_of(base, point) for point in points]
    return base.task.engine(settings, points[0].seed, base.conditions())


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
