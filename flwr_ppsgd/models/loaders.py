"""One user's loader as minibatches by visit, without reading more of it than a visit needs."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from flwr_ppsgd.learner import Rows, minibatch_rows
from flwr_ppsgd.models.batch import Parts, finite, named_parts, over_parts

Loader: TypeAlias = Iterable[Any]
MOST_BYTES = 2**30  # a loader that holds more is read batch by batch, never as a whole


class LoaderBatches:
    """Minibatches of a loader, by visit; visits beyond its end go on from its beginning.

    A ``DataLoader`` over a dataset with numbered rows is not iterated: visit v fetches its own rows
    alone, which (user, v) decide, and every epoch visits each row once. Of any other iterable the
    rows are read once if they fit in memory. If they do not, or if nobody knows how many there are,
    visit v takes its batch number v.

    Args:
        loader: the batches.
        parts: which parts of a batch are what.
        user: decides the order of rows.
        most_bytes: the most that is held in memory.
        name: of the loader, for errors.
    """

    def __init__(
        self,
        loader: Loader,
        parts: Parts,
        *,
        user: int = 0,
        most_bytes: int = MOST_BYTES,
        name: str = "train",
    ) -> None:
        _refuse_one_shot(loader, name)
        self._name = name
        self._loader = loader
        self._parts = parts
        self._user = user
        self._held: tuple[Rows, Rows] | None = None
        self._numbered = has_numbered_rows(loader)
        if self._numbered:
            self.num_examples = len(loader.dataset)  # type: ignore[attr-defined]
            _refuse_empty(self.num_examples, name)
            self._size = int(loader.batch_size)  # type: ignore[attr-defined]
            return
        first = self._first()
        count = _length(loader)
        self._size = getattr(loader, "batch_size", None) or rows_in(first)
        self.num_examples = count * rows_in(first) if count else rows_in(first)
        if count and count * _bytes(first) <= most_bytes:
            self._held = joined(list(self.epoch()))
            self.num_examples = rows_in(self._held)

    def __call__(self, visit: int) -> tuple[Rows, Rows]:
        """(inputs, target) of a visit, counted from 1."""
        if self._numbered or self._held:
            rows = minibatch_rows(0, self._user, visit, self.num_examples, self._size)
            return self._at(rows.tolist())
        return self._iterated(visit)

    def epoch(self) -> Iterator[tuple[Rows, Rows]]:
        """All rows, in their order if they are numbered, one batch after the other."""
        if self._held is not None:
            yield self._held
            return
        if self._numbered:
            for start in range(0, self.num_examples, self._size):
                yield self._at(list(range(start, min(start + self._size, self.num_examples))))
            return
        for batch in self._loader:
            yield self._read(batch)

    def _at(self, rows: list[int]) -> tuple[Rows, Rows]:
        if self._held is not None:
            x, y = self._held
            chosen = torch.tensor(rows)
            return over_parts(x, lambda tensor, _: tensor[chosen]), y[chosen]
        loader: Any = self._loader
        several = getattr(loader.dataset, "__getitems__", None)
        samples = several(rows) if several else [loader.dataset[row] for row in rows]
        return self._read(loader.collate_fn(samples))

    def _iterated(self, visit: int) -> tuple[Rows, Rows]:
        count = _length(self._loader)
        skipped = visit - 1
        if count:
            skipped %= count
        endless = itertools.chain.from_iterable(itertools.repeat(self._loader))
        batch = next(itertools.islice(endless, skipped, None))
        return self._read(batch)

    def _first(self) -> tuple[Rows, Rows]:
        for batch in self._loader:
            return self._read(batch)
        _refuse_empty(0, self._name)
        raise AssertionError

    def _read(self, batch: Any) -> tuple[Rows, Rows]:
        x, y = self._parts.of(batch)
        return over_parts(x, finite), finite(y, "target")


def has_numbered_rows(loader: Any) -> bool:
    """Whether a loader draws all rows of a dataset by their numbers, so that any row can be had."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return False
    sampler: Any = loader.sampler
    plain = isinstance(sampler, RandomSampler | SequentialSampler)
    return plain and sampler.data_source is loader.dataset and hasattr(loader.dataset, "__len__")


def joined(batches: list[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    """All batches in one."""
    _refuse_empty(len(batches), "train")
    xs = [named_parts(x) for x, _ in batches]
    y = torch.cat([y for _, y in batches])
    x = over_parts(batches[0][0], lambda _, part: torch.cat([each[part] for each in xs]))
    return x, y


def rows_in(rows: tuple[Rows, Rows]) -> int:
    """The number of samples in a batch."""
    return len(rows[1])


def _length(loader: Loader) -> int | None:
    """The number of batches, if the loader knows it."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _bytes(rows: tuple[Rows, Rows]) -> int:
    x, y = rows
    tensors = [*named_parts(x).values(), y]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _refuse_empty(count: int, name: str) -> None:
    if count:
        return
    if name == "test":
        raise ValueError(
            "the test loader has no batch: return (train, None) for a user without test rows"
        )
    raise ValueError(
        "a loader has no batch: a user needs at least one row; give this node data, or leave it "
        "out of the enrolled population"
    )


def _refuse_one_shot(loader: Loader, name: str) -> None:
    if isinstance(loader, Iterator):
        raise ValueError(
            f"the {name} loader is a {type(loader).__name__}, which can be read only once: return "
            "a DataLoader, or a list of batches"
        )
