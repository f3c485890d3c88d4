"""Which of a user's rows are set apart: for testing, or for choosing settings."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.checks import require
from flwr_ppsgd.learner import generator

Indices: TypeAlias = NDArray[np.intp]


@dataclass(frozen=True)
class Split:
    """How each user's test part is chosen if no column marks it.

    Args:
        fraction: the share of a user's rows, rounded; for users with two or more rows at least one
            row and never all.
        seed: decides which rows, unless there is a time column: then they are the last ones.
    """

    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        rule = "the test fraction must be between 0 and 1"
        require(
            0 < self.fraction < 1,
            rule,
            self.fraction,
            "try 0.2",
        )

    def mask(self, offsets: Indices, time: NDArray[Any] | None) -> NDArray[np.bool_]:
        """The test rows of users whose rows are sorted by user."""
        bounds = offsets.tolist()
        test = np.zeros(bounds[-1], dtype=np.bool_)
        for user, start in enumerate(bounds[:-1]):
            stop = bounds[user + 1]
            n = stop - start
            wanted = max(1, round(self.fraction * n))
            count = min(wanted, n - 1)
            if time is None:
                order = generator("split", self.seed, user).permutation(n)
            else:
                order = np.argsort(time[start:stop], kind="stable")
            test[start + order[n - count :]] = True
        return test

    def words(self, by_time: bool) -> str:
        """How the test part was chosen, for people."""
        which = "last" if by_time else "randomly chosen"
        return f"test part: the {which} {self.fraction:.0%} of each user's rows"
