"""What the server does with a released gradient, by any optimizer of torch."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import require
from flwr_ppsgd.optimizers import CONSTANT, COUNT, Released, Schedule, State

RATE = "lr"  # what torch calls the step


@dataclass(frozen=True)
class TorchServer:
    """A class of ``torch.optim``, made with lr = the step, fed with the released mean.

    For ``PPSGD(optimizer=TorchServer(torch.optim.RMSprop, {"alpha": 0.9}), steps=…)``. The learning
    rate is ``steps.shared`` times the schedule's factor. What torch keeps between steps goes into
    the checkpoint, so that a restart goes on to the same bits. Torch knows nothing of the noise in
    the mean; ``flwr_ppsgd.Adam`` does.

    Args:
        optimizer: the class. Its steps need no closure, and what it keeps are numbers and tensors
            of the parameter, so ``LBFGS`` is refused.
        options: of the class, by name; the learning rate is not among them.
        schedule: of the step.
    """

    optimizer: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    schedule: Schedule = CONSTANT

    def __post_init__(self) -> None:
        made = self.optimizer
        is_class = inspect.isclass(made) and issubclass(made, torch.optim.Optimizer)
        rule = "optimizer must be a class of torch.optim"
        require(is_class, rule, made, "such as torch.optim.RMSprop; options go beside it")
        rule = "options must not hold lr"
        require(RATE not in self.options, rule, self.options, "it is steps.shared")
        self.initial(1)

    def initial(self, size: int) -> State:
        """Zeros in place of what torch will keep; torch itself begins at the first step."""
        kept = self._warm(torch.zeros(size, dtype=torch.float64), 1.0)
        state = {self._name(name): np.zeros(tensor.numel()) for name, tensor in kept.tensors()}
        return {COUNT: np.zeros(1), **state}

    def moved(
        self, w: Vector, released: Released, step: float, state: State
    ) -> tuple[Vector, State]:
        """One step of torch's, from what it has kept."""
        done = int(state[COUNT][0])
        rate = step * self.schedule.factor(done)
        start = torch.tensor(w, dtype=torch.float64)
        if done:
            made = self._warm(start, rate)
            made.put({name: state[self._name(name)] for name, _ in made.tensors()})
        else:
            made = self._made(start, rate)
        made.step(torch.tensor(released.mean))
        after = {self._name(name): _vector(tensor) for name, tensor in made.tensors()}
        return _vector(made.parameter), {COUNT: state[COUNT] + 1, **after}

    def _name(self, name: str) -> str:
        """Of one of torch's tensors in the state: another class keeps others."""
        return f"{self.optimizer.__name__}-{name}"

    def _made(self, start: Tensor, rate: float) -> "_Made":
        parameter = nn.Parameter(start.clone())
        try:
            return _Made(parameter, self.optimizer([parameter], lr=rate, **self.options))  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(f"{self.optimizer.__name__} refuses its options: {error}") from None

    def _warm(self, start: Tensor, rate: float) -> "_Made":
        """With a step behind it that has changed nothing, so that torch has made its tensors."""
        made = self._made(start, rate)
        settings = made.settings()
        try:
            made.step(torch.zeros_like(start))
            made.check()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self.optimizer.__name__} cannot move w, one long vector, by a gradient alone "
                f"({error}): use another class, such as torch.optim.RMSprop"
            ) from None
        if made.settings() != settings:
            raise ValueError(
                f"{self.optimizer.__name__} keeps what it has learnt among its settings, where a "
                "checkpoint would lose it: use another class, such as torch.optim.RMSprop"
            )
        with torch.no_grad():
            made.parameter.copy_(start)  # weight decay may have moved it
        return made


@dataclass(frozen=True)
class _Made:
    """A parameter with the optimizer that moves it."""

    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer

    def step(self, gradient: Tensor) -> None:
        self.parameter.grad = gradient
        self.optimizer.step()

    def settings(self) -> list[dict[str, Any]]:
        """Of the optimizer, without the parameter."""
        groups = self.optimizer.state_dict()["param_groups"]
        return [dict(group) for group in groups]

    def check(self) -> None:
        """ValueError if something is kept that is no tensor."""
        for name, value in self._kept().items():
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(f"it keeps {name}, a {type(value).__name__}")

    def tensors(self) -> list[tuple[str, Tensor]]:
        """What the optimizer keeps between steps, by name."""
        return [(name, value) for name, value in self._kept().items() if value is not None]

    def put(self, vectors: Mapping[str, Vector]) -> None:
        """Go on from what was kept."""
        for name, tensor in self.tensors():
            tensor.copy_(torch.tensor(vectors[name]).reshape(tensor.shape))

    def _kept(self) -> dict[str, Any]:
        return dict(self.optimizer.state[self.parameter])


def _vector(tensor: Tensor) -> Vector:
    """A copy, as a vector of float64."""
    return tensor.detach().reshape(-1).to(torch.float64, copy=True).numpy()
