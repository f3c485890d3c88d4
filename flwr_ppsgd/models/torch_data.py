"""Batches as loaders give them: which part is the target, how inputs reach a network, which rows
belong to a visit."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from flwr_ppsgd.learner import Rows, minibatch_rows

Loader: TypeAlias = Iterable[Any]
Part: TypeAlias = str | int
Call: TypeAlias = tuple[tuple[Tensor, ...], dict[str, Tensor]]

# the usual names of a target in a batch that is a mapping
TARGETS = ("label", "labels", "target", "targets", "y")
MOST_BYTES = 2**30  # a loader that holds more is read batch by batch, never as a whole


# --- the parts of a batch


@dataclass(frozen=True)
class BatchParts:
    """Which parts of a batch are the inputs of the network, and which one is the target.

    A part is a name in a mapping, or a position in a tuple.

    Args:
        inputs: one part or several; None: everything but the target.
        target: None: the part with a usual name, or the second of two.
    """

    inputs: Part | Sequence[Part] | None = None
    target: Part | None = None

    def of(self, batch: Any) -> tuple[Rows, Rows]:
        """(inputs, target) of one batch as tensors; ValueError if one holds NaN or infinity."""
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
        target = self._find_target(batch)
        inputs = self._find_inputs(list(parts), target)
        missing = [part for part in (*inputs, target) if part not in parts]
        if missing or not inputs:
            raise ValueError(
                f"a batch has the parts {list(parts)}, and {missing} were asked for: name parts "
                "that it has with inputs and target"
            )
        x: Any = {str(part): parts[part] for part in inputs}
        if not isinstance(batch, Mapping):
            x = tuple(x.values())
            if len(x) == 1:
                (x,) = x
            if isinstance(x, list) and any(isinstance(part, Tensor) for part in x):
                x = tuple(x)  # torch's loaders turn tuples into lists
        return map_parts(x, _finite_tensor), _finite_tensor(parts[target], "target")

    def _find_target(self, batch: Any) -> Part:
        if self.target is not None:
            return self.target
        if isinstance(batch, Mapping):
            known = [name for name in batch if name in TARGETS]
            if len(known) == 1:
                return known[0]  # type: ignore[no-any-return]
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

    def _find_inputs(self, parts: list[Part], target: Part) -> list[Part]:
        if self.inputs is None:
            return [part for part in parts if part != target]
        if isinstance(self.inputs, str | int):
            return [self.inputs]
        return list(self.inputs)


def parts_of(x: Rows) -> dict[Part, Rows]:
    """The inputs by name, or by position."""
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, tuple):
        return dict(enumerate(x))
    return {"x": x}


def map_parts(x: Rows, change: Callable[[Rows, Part], Tensor]) -> Rows:
    """The inputs in the same form, each one changed by (values, name or position)."""
    changed = {part: change(values, part) for part, values in parts_of(x).items()}
    if isinstance(x, Mapping):
        return changed
    if isinstance(x, tuple):
        return tuple(changed.values())
    return changed["x"]


def _as_tensor(values: Rows, part: Part) -> Tensor:
    """ValueError with the name of the part if it cannot be a tensor."""
    if isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"part {part!r} of a batch is not a tensor ({error}): leave it out with inputs=[…]"
        ) from None


def _finite_tensor(values: Rows, part: Part) -> Tensor:
    """ValueError if a float in it is NaN or infinite."""
    tensor = _as_tensor(values, part)
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(
            f"part {part!r} of a batch holds NaN or infinity: clean this user's data "
            "(torch.nan_to_num, or leave those rows out)"
        )
    return tensor


# --- a network's inputs and outputs


class NetworkInputs:
    """How tensors reach a network: on its device, floats in its precision, whole numbers as they
    are; parts of a mapping by keyword, those of a tuple by position.

    Args:
        module: the network.
    """

    def __init__(self, module: nn.Module) -> None:
        first = next(module.parameters())
        self.device = first.device
        self._dtype = first.dtype
        self._network = type(module).__name__
        parameters = inspect.signature(module.forward).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._takes = [each.name for each in parameters if each.kind in by_name]
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)

    def call(self, x: Rows) -> Call:
        """(positional, keyword) arguments of the network."""
        tensors = map_parts(x, self.tensor)
        if isinstance(x, tuple):
            return tensors, {}
        if not isinstance(x, Mapping):
            return (tensors,), {}
        unknown = [name for name in tensors if name not in self._takes]
        if len(tensors) == 1 and unknown:  # one input needs no name
            return tuple(tensors.values()), {}
        if unknown and not self._takes_any:
            raise ValueError(
                f"a batch has the inputs {list(tensors)} and {self._network}.forward takes "
                f"{self._takes}: name those that it takes with inputs=[…]"
            )
        return (), tensors

    def tensor(self, values: Rows, part: Part = "y") -> Tensor:
        """One part as a tensor; floats in the network's precision."""
        tensor = _as_tensor(values, part)
        if tensor.is_floating_point():
            return tensor.to(self.device, self._dtype)
        return tensor.to(self.device)


def scores_of(output: Any, network: str) -> Tensor:
    """The predictions in what a network returns: a tensor, or something with ``logits``."""
    if isinstance(output, Tensor):
        return output
    scores = getattr(output, "logits", None)
    if scores is None and isinstance(output, Mapping):
        scores = output.get("logits")
    if isinstance(scores, Tensor):
        return scores
    raise ValueError(
        f"{network} returned a {type(output).__name__} without logits: return a tensor of "
        "predictions, or something that has them as logits"
    )


# --- minibatches of a loader


class LoaderBatches:
    """Minibatches of a loader, by visit; visits beyond its end go on from its beginning.

    A ``DataLoader`` over a dataset with numbered rows is not iterated: visit v fetches its own rows
    alone, which (user, v) decide, and every epoch visits each row once. Of any other iterable the
    rows are read once if they fit in memory. If they do not, or if their number is not known,
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
        parts: BatchParts,
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
        self._parts = parts
        self._user = user
        self._most_bytes = most_bytes
        self._held: tuple[Rows, Rows] | None = None
        self._numbered = _has_numbered_rows(loader)
        if self._numbered:
            self.num_examples = len(loader.dataset)  # type: ignore[attr-defined]
            if not self.num_examples:
                raise _empty_error(name)
            self._size = int(loader.batch_size)  # type: ignore[attr-defined]
            return
        first = next(self.epoch(), None)
        if first is None:
            raise _empty_error(name)
        _, y = first
        rows = len(y)
        self._size = getattr(loader, "batch_size", None) or rows
        self._batches = _length(loader)
        self.num_examples = rows * (self._batches or 1)
        if self._batches and self._batches * _count_bytes(first) <= most_bytes:
            self._read_all()

    def __call__(self, visit: int) -> tuple[Rows, Rows]:
        """(inputs, target) of a visit, counted from 1."""
        if self._numbered or self._held:
            rows = minibatch_rows(0, self._user, visit, self.num_examples, self._size)
            return self._at(rows.tolist())
        skipped = visit - 1
        if self._batches:
            skipped %= self._batches
        endless = itertools.chain.from_iterable(itertools.repeat(self._loader))
        return self._parts.of(next(itertools.islice(endless, skipped, None)))

    def epoch(self) -> Iterator[tuple[Rows, Rows]]:
        """All rows, in their order if they are numbered, one batch after the other."""
        if self._held is not None:
            yield self._held
        elif self._numbered:
            for start in range(0, self.num_examples, self._size):
                end = min(start + self._size, self.num_examples)
                yield self._at(list(range(start, end)))
        else:
            for batch in self._loader:
                yield self._parts.of(batch)

    def keep_in_memory(self) -> None:
        """Read numbered rows once, if they fit in memory: for several epochs in one visit."""
        if not self._numbered or self._held is not None:
            return
        first = next(self.epoch())
        batches = -(-self.num_examples // self._size)
        if batches * _count_bytes(first) <= self._most_bytes:
            self._read_all()

    def _read_all(self) -> None:
        """Batches whose rows differ in shape, such as padded texts, stay as the loader has them."""
        batches = list(self.epoch())
        shapes = {tuple(each.shape[1:] for each in _tensors(rows)) for rows in batches}
        self.num_examples = sum(len(y) for _, y in batches)
        if len(shapes) == 1:
            self._held = join_batches(batches)

    def _at(self, rows: list[int]) -> tuple[Rows, Rows]:
        if self._held is not None:
            x, y = self._held
            chosen = torch.tensor(rows)
            return map_parts(x, lambda tensor, _: tensor[chosen]), y[chosen]
        loader: Any = self._loader
        several = getattr(loader.dataset, "__getitems__", None)
        samples = several(rows) if several else [loader.dataset[row] for row in rows]
        return self._parts.of(loader.collate_fn(samples))


def join_batches(batches: list[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    """All batches in one."""
    xs = [parts_of(x) for x, _ in batches]

    def join(_: Rows, part: Part) -> Tensor:
        return torch.cat([x[part] for x in xs])

    first, _ = batches[0]
    y = torch.cat([y for _, y in batches])
    return map_parts(first, join), y


def _has_numbered_rows(loader: Any) -> bool:
    """Whether a loader draws all rows of a dataset by their numbers, so that any row can be had."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return False
    sampler: Any = loader.sampler
    plain = isinstance(sampler, RandomSampler | SequentialSampler)
    return plain and sampler.data_source is loader.dataset and hasattr(loader.dataset, "__len__")


def _length(loader: Loader) -> int | None:
    """The number of batches, if the loader knows it."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _tensors(rows: tuple[Rows, Rows]) -> list[Tensor]:
    """All tensors of a batch."""
    x, y = rows
    return [*parts_of(x).values(), y]


def _count_bytes(rows: tuple[Rows, Rows]) -> int:
    return sum(tensor.nbytes for tensor in _tensors(rows))


def _empty_error(name: str) -> ValueError:
    if name == "test":
        return ValueError(
            "the test loader has no batch: return (train, None) for a user without test rows"
        )
    return ValueError(
        "a loader has no batch: a user needs at least one row; give this node data, or leave it "
        "out of the enrolled population"
    )
