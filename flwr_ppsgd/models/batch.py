"""What a loader's batch holds: the inputs of a network, and the target."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flwr_ppsgd.learner import Rows

# the usual names of a target in a batch that is a mapping
TARGETS = ("label", "labels", "target", "targets", "y")
Part: TypeAlias = str | int
Call: TypeAlias = tuple[tuple[Tensor, ...], dict[str, Tensor]]


@dataclass(frozen=True)
class Parts:
    """Which parts of a batch are the inputs of the network, and which one is the target.

    A part is a name in a mapping, or a position in a tuple.

    Args:
        inputs: one part or several; None: everything but the target.
        target: None: the part with a usual name, or the second of two.
    """

    inputs: Part | Sequence[Part] | None = None
    target: Part | None = None

    def of(self, batch: Any) -> tuple[Rows, Rows]:
        """(inputs, target) of one batch, as they are in it."""
        if hasattr(batch, "_asdict"):
            batch = batch._asdict()
        if isinstance(batch, Mapping):
            return self._of_mapping(batch)
        if isinstance(batch, list | tuple):
            return self._of_sequence(batch)
        raise ValueError(
            f"a batch is a {type(batch).__name__}, not (x, y) or a mapping: let the loader return "
            "one of those"
        )

    def _of_mapping(self, batch: Mapping[Any, Any]) -> tuple[Rows, Rows]:
        target = self._target_in(batch)
        names = self._listed()
        if names is None:
            names = [name for name in batch if name != target]
        missing = [name for name in (*names, target) if name not in batch]
        if missing or not names:
            raise ValueError(
                f"a batch has the parts {sorted(batch)}, and inputs={names}, target={target!r} "
                "were asked for: name parts that it has"
            )
        return {str(name): batch[name] for name in names}, batch[target]

    def _target_in(self, batch: Mapping[str, Any]) -> Any:
        if self.target is not None:
            return self.target
        known = [name for name in batch if name in TARGETS]
        if len(known) != 1:
            raise ValueError(
                f"which of a batch's parts {sorted(batch)} is the target is not known (usual names "
                f'are {", ".join(TARGETS)}): add target="…", the name of one of them'
            )
        return known[0]

    def _of_sequence(self, batch: Sequence[Any]) -> tuple[Rows, Rows]:
        size = len(batch)
        places = self._listed()
        target = self.target
        if size != 2 and (places is None or target is None):
            raise ValueError(
                f"a batch has {size} parts where (x, y) has 2: say which are which, such as "
                f"inputs={list(range(size - 1))}, target={size - 1}"
            )
        if target is None:
            target = 1
        if places is None:
            places = [1 - int(target)] if target in (0, 1) else [0]
        wrong = [place for place in (*places, target) if not _is_place(place, size)]
        if wrong:
            raise ValueError(
                f"a batch has {size} parts, and {wrong} were asked for: inputs and target are "
                f"positions from 0 to {size - 1}"
            )
        chosen = tuple(batch[int(place)] for place in places)
        x = chosen[0] if len(chosen) == 1 else chosen
        several = isinstance(x, list) and any(isinstance(part, Tensor) for part in x)
        if several:  # torch's loaders turn tuples into lists
            x = tuple(x)
        return x, batch[int(target)]

    def _listed(self) -> list[Part] | None:
        if self.inputs is None:
            return None
        if isinstance(self.inputs, str | int):
            return [self.inputs]
        return list(self.inputs)


def _is_place(place: Part, size: int) -> bool:
    return isinstance(place, int) and 0 <= place < size


@dataclass(frozen=True)
class Feeding:
    """How tensors reach a network: on its device, floats in its precision, whole numbers as they
    are; parts of a mapping by keyword, those of a tuple by position.

    Args:
        name: of the network's class.
        takes: the names of ``forward``'s parameters.
        takes_any: whether ``forward`` takes any keyword.
        device: of the network.
        dtype: of its first parameter.
    """

    name: str
    takes: tuple[str, ...]
    takes_any: bool
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def into(cls, module: nn.Module, device: torch.device, dtype: torch.dtype) -> "Feeding":
        """For this module."""
        parameters = inspect.signature(module.forward).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes = tuple(each.name for each in parameters if each.kind in by_name)
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        return cls(type(module).__name__, takes, takes_any, device, dtype)

    def call(self, x: Rows) -> Call:
        """(positional, keyword) arguments of the network."""
        tensors = over_parts(x, self.tensor)
        if isinstance(x, Mapping):
            return self._named(tensors)
        if isinstance(x, tuple):
            return tensors, {}
        return (tensors,), {}

    def _named(self, named: dict[str, Tensor]) -> Call:
        """One input goes by position unless ``forward`` knows its name."""
        if len(named) == 1 and not set(named) <= set(self.takes):
            return tuple(named.values()), {}
        unknown = [name for name in named if name not in self.takes]
        if unknown and not self.takes_any:
            raise ValueError(
                f"a batch has the inputs {list(named)} and {self.name}.forward takes "
                f"{list(self.takes)}: name those that it takes with inputs=[…]"
            )
        return (), named

    def tensor(self, values: Rows, part: Part = "y") -> Tensor:
        """One part as a tensor; floats in the network's precision."""
        tensor = as_tensor(values, part)
        if tensor.is_floating_point():
            return tensor.to(self.device, self.dtype)
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


def named_parts(x: Rows) -> dict[Part, Rows]:
    """The inputs by name, or by position."""
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, tuple):
        return dict(enumerate(x))
    return {"x": x}


def over_parts(x: Rows, change: Callable[[Rows, Part], Tensor]) -> Rows:
    """The inputs in the same form, each one changed by (values, name or position)."""
    changed = {part: change(values, part) for part, values in named_parts(x).items()}
    if isinstance(x, Mapping):
        return changed
    if isinstance(x, tuple):
        return tuple(changed.values())
    return changed["x"]


def as_tensor(values: Rows, part: Part) -> Tensor:
    """ValueError with the name of the part if it cannot be a tensor."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"part {part!r} of a batch is no tensor ({error}): leave it out with inputs=[…]"
        ) from None


def finite(values: Rows, part: Part) -> Tensor:
    """One part as a tensor; ValueError if a float in it is NaN or infinite."""
    tensor = as_tensor(values, part)
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(
            f"part {part!r} of a batch holds NaN or infinity: clean this user's data "
            "(torch.nan_to_num, or leave those rows out)"
        )
    return tensor
