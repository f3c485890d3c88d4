"""The batches of loaders: the parts of a batch, and the rows of a visit."""

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from flwr_ppsgd.learner import Rows, minibatch_rows

Loader: TypeAlias = Iterable[Any]
BatchKey: TypeAlias = str | int  # of a batch: a name in a mapping, or a position in a tuple

# the usual names of a target in a batch that is a mapping
TARGETS = ("label", "labels", "target", "targets", "y")
MOST_BYTES = 2**30  # a loader that holds more is read batch by batch, never as a whole
NO_BATCH = {
    "train": "a loader has no batch: a user needs at least one row; give this node data, or leave "
    "it out of the enrolled population",
    "test": "the test loader has no batch: return (train, None) for a user without test rows",
}


# --- the parts of a batch


def split_batch(
    batch: Any, inputs: BatchKey | Sequence[BatchKey] | None = None, target: BatchKey | None = None
) -> tuple[Rows, Rows]:
    """(inputs, target) of one batch as tensors; ValueError if one holds NaN or infinity.

    Args:
        batch: a mapping or a tuple.
        inputs: one part or several; None: everything but the target.
        target: None: the part with a usual name, or the second of two.
    """
    if hasattr(batch, "_asdict"):
        batch = batch._asdict()
    if isinstance(batch, Mapping):
        parts = dict(batch)
    elif isinstance(batch, list | tuple):
        parts = dict(enumerate(batch))
    else:
        raise ValueError(
            f"a batch is a {type(batch).__name__}, not (x, y) or a mapping: let the loader "
            "return one of those"
        )
    if target is None:
        target = _usual_target(batch)
    if inputs is None:
        inputs = [part for part in parts if part != target]
    elif isinstance(inputs, str | int):
        inputs = [inputs]
    missing = [part for part in (*inputs, target) if part not in parts]
    if missing or not inputs:
        raise ValueError(
            f"a batch has the parts {list(parts)}, and {missing} were asked for: name parts "
            "that it has with inputs and target"
        )
    x: Any = {str(part): parts[part] for part in inputs}
    if not isinstance(batch, Mapping):
        x = _positional_inputs(list(x.values()))
    return map_parts(x, _finite_tensor), _finite_tensor(parts[target], "target")


def _usual_target(batch: Any) -> BatchKey:
    """The part with a usual name, or the second of two."""
    if isinstance(batch, Mapping):
        known: list[BatchKey] = [name for name in batch if name in TARGETS]
        if len(known) == 1:
            return known[0]
        raise ValueError(
            f"which of a batch's parts {list(batch)} is the target is not known (usual names "
            f'are {", ".join(TARGETS)}): add target="…", the name of one of them'
        )
    size = len(batch)
    if size == 2:
        return 1
    raise ValueError(
        f"a batch has {size} parts where (x, y) has 2: say which are which, such as "
        f"inputs={list(range(size - 1))}, target={size - 1}"
    )


def _positional_inputs(inputs: list[Any]) -> Any:
    """One input as it is, several as a tuple."""
    if len(inputs) > 1:
        return tuple(inputs)
    (x,) = inputs
    if isinstance(x, list) and any(isinstance(part, Tensor) for part in x):
        return tuple(x)  # torch's loaders turn tuples into lists
    return x


def parts_of(x: Rows) -> dict[BatchKey, Rows]:
    """The inputs by name, or by position."""
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, tuple):
        return dict(enumerate(x))
    return {"x": x}


def map_parts(x: Rows, change: Callable[[Rows, BatchKey], Tensor]) -> Rows:
    """The inputs in the same form, each replaced by ``change(values, name or position)``."""
    changed = {part: change(values, part) for part, values in parts_of(x).items()}
    if isinstance(x, Mapping):
        return changed
    if isinstance(x, tuple):
        return tuple(changed.values())
    return changed["x"]


def as_tensor(values: Rows, part: BatchKey) -> Tensor:
    """The values as a tensor; ValueError with the name of the part if they cannot be one."""
    if isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"part {part!r} of a batch is not a tensor ({error}): leave it out with inputs=[…]"
        ) from None


def _finite_tensor(values: Rows, part: BatchKey) -> Tensor:
    """The values as a tensor; ValueError if a float is NaN or infinite."""
    tensor = as_tensor(values, part)
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(
            f"part {part!r} of a batch holds NaN or infinity: clean this user's data "
            "(torch.nan_to_num, or leave those rows out)"
        )
    return tensor


# --- a network's inputs and outputs


def call_arguments(network: nn.Module, x: Rows) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """(positional, keyword): parts of a mapping go by keyword, those of a tuple by position."""
    if isinstance(x, tuple):
        return x, {}
    if not isinstance(x, Mapping):
        return (x,), {}
    parameters = inspect.signature(network.forward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [each.name for each in parameters if each.kind in by_name]
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    unknown = [name for name in x if name not in takes]
    if len(x) == 1 and unknown:  # one input needs no name
        return tuple(x.values()), {}
    if unknown and not takes_any:
        raise ValueError(
            f"a batch has the inputs {list(x)} and {type(network).__name__}.forward takes "
            f"{takes}: name those that it takes with inputs=[…]"
        )
    return (), dict(x)


def scores_of(output: Any, network: nn.Module) -> Tensor:
    """The predictions in what a network returns: a tensor, or something with ``logits``."""
    if isinstance(output, Tensor):
        return output
    scores = getattr(output, "logits", None)
    if scores is None and isinstance(output, Mapping):
        scores = output.get("logits")
    if isinstance(scores, Tensor):
        return scores
    raise ValueError(
        f"{type(network).__name__} returned a {type(output).__name__} without logits: return a "
        "tensor of predictions, or something that has them as logits"
    )


# --- minibatches of a loader


class LoaderBatches:
    """Minibatches of a loader, by visit; visits beyond its end continue at its beginning.

    A ``DataLoader`` over a dataset with numbered rows is not iterated: visit v fetches only the
    rows that (user, v) decide, and every epoch visits each row once. The rows of any other iterable
    are read once if they fit in memory. If they do not, or if their number is not known, visit v
    takes its batch number v.

    Args:
        loader: the batches.
        inputs, target: as for ``split_batch``.
        user: decides the order of rows.
        most_bytes: the largest size of rows that are kept in memory.
        name: of the loader, for errors: "train" or "test".
    """

    def __init__(
        self,
        loader: Loader,
        inputs: BatchKey | Sequence[BatchKey] | None = None,
        target: BatchKey | None = None,
        *,
        user: int = 0,
        most_bytes: int = MOST_BYTES,
        name: str = "train",
    ) -> None:
        if isinstance(loader, Iterator):
            raise ValueError(
                f"the {name} loader is a {type(loader).__name__}, which can be read only once: "
                "return a DataLoader, or a list of batches"
            )
        self._loader = loader
        self._inputs = inputs
        self._target = target
        self._user = user
        self._most_bytes = most_bytes
        self._held: tuple[Rows, Rows] | None = None  # all rows, if they are in memory
        self._dataset = _numbered_rows(loader)
        if self._dataset is not None:
            self.num_examples = len(self._dataset)
            self._size = int(getattr(loader, "batch_size", 1))
            self._num_batches = math.ceil(self.num_examples / self._size)
            if not self.num_examples:
                raise ValueError(NO_BATCH[name])
            return
        first = next(iter(self), None)
        if first is None:
            raise ValueError(NO_BATCH[name])
        _, y = first
        self._size = getattr(loader, "batch_size", None) or len(y)
        self._num_batches = operator.length_hint(loader)  # 0 if it is not known
        self.num_examples = len(y) * max(1, self._num_batches)
        if self._num_batches and self._fits(first):
            self._read_all()

    def __call__(self, visit: int) -> tuple[Rows, Rows]:
        """(inputs, target) of a visit, counted from 1."""
        if self._dataset is not None or self._held is not None:
            rows = minibatch_rows(0, self._user, visit, self.num_examples, self._size)
            return self._rows_at(rows.tolist())
        skipped = visit - 1
        if self._num_batches:
            skipped %= self._num_batches
        endless = itertools.chain.from_iterable(itertools.repeat(self._loader))
        return self._split(next(itertools.islice(endless, skipped, None)))

    def __iter__(self) -> Iterator[tuple[Rows, Rows]]:
        """All rows, in their order if they are numbered, one batch after the other."""
        if self._held is not None:
            yield self._held
        elif self._dataset is not None:
            for start in range(0, self.num_examples, self._size):
                end = min(start + self._size, self.num_examples)
                yield self._rows_at(list(range(start, end)))
        else:
            for batch in self._loader:
                yield self._split(batch)

    def keep_in_memory(self) -> None:
        """Read numbered rows once, if they fit in memory: for several epochs in one visit."""
        if self._dataset is None or self._held is not None:
            return
        if self._fits(next(iter(self))):
            self._read_all()

    def _split(self, batch: Any) -> tuple[Rows, Rows]:
        return split_batch(batch, self._inputs, self._target)

    def _rows_at(self, rows: list[int]) -> tuple[Rows, Rows]:
        """The rows of these numbers."""
        if self._held is not None:
            x, y = self._held
            chosen = torch.tensor(rows)
            return map_parts(x, lambda tensor, _: tensor[chosen]), y[chosen]
        fetch_several = getattr(self._dataset, "__getitems__", None)
        samples = fetch_several(rows) if fetch_several else [self._dataset[row] for row in rows]
        loader: Any = self._loader
        return self._split(loader.collate_fn(samples))

    def _fits(self, first: tuple[Rows, Rows]) -> bool:
        """Whether all batches fit in memory, if all are like the first."""
        x, y = first
        tensors = [*parts_of(x).values(), y]
        bytes_of_one = sum(int(tensor.nbytes) for tensor in tensors)
        return self._num_batches * bytes_of_one <= self._most_bytes

    def _read_all(self) -> None:
        """Keep all rows in memory, unless their shapes differ, as those of padded texts do."""
        batches = list(self)
        self.num_examples = sum(len(y) for _, y in batches)
        shapes = set()
        for x, y in batches:
            tensors = [*parts_of(x).values(), y]
            shapes.add(tuple(tensor.shape[1:] for tensor in tensors))
        if len(shapes) != 1:
            return
        xs = [parts_of(x) for x, _ in batches]
        first, _ = batches[0]
        x = map_parts(first, lambda _, part: torch.cat([each[part] for each in xs]))
        y = torch.cat([y for _, y in batches])
        self._held = (x, y)


def _numbered_rows(loader: Any) -> Any:
    """The dataset of a loader that draws all rows by their numbers; None for other loaders."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    sampler: Any = loader.sampler
    dataset: Any = loader.dataset
    if not isinstance(sampler, RandomSampler | SequentialSampler) or not hasattr(
        dataset, "__len__"
    ):
        return None
    return dataset if sampler.data_source is dataset else None
