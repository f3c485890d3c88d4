"""How a user trains θ: any torch optimizer, free under the guarantee, since θ never leaves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.checks import count, require

OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]
Schedule: TypeAlias = Callable[[int], float]
# (θ, which minibatch) → (loss, ∇_θ)
PersonalGradient: TypeAlias = Callable[[Vector, int], tuple[float, Vector]]


@dataclass(frozen=True)
class PersonalTraining:
    """The steps that θ takes in one visit, at the w that came.

    The optimizer is made anew for each visit, so momentum lasts for the steps of one visit.

    Args:
        optimizer: a class of ``torch.optim``, whose learning rate is then the server's s_θ, or a
            function of the parameters that makes one, such as
            ``functools.partial(torch.optim.Adam, lr=0.01)``; None is plain SGD with s_θ.
        steps: the number of steps in a visit; each takes the next minibatch.
        weight_decay: λ of (λ/2)‖θ‖², which is added to the loss.
        schedule: the factor on the learning rate at visit 1, 2, …
    """

    optimizer: OptimizerFactory | None = None
    steps: int = 1
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        count("personal_steps", self.steps)
        valid = 0 <= self.weight_decay < float("inf")
        rule = "weight_decay must be a number from 0"
        require(valid, rule, self.weight_decay, "set weight_decay")
        made = self.optimizer
        callable_ = made is None or callable(made)
        rule = "optimizer must be a class of torch.optim or a function that makes one"
        remedy = "such as torch.optim.Adam or functools.partial(torch.optim.Adam, lr=0.01)"
        # the repr of an optimizer has many lines
        shown = type(made) if isinstance(made, torch.optim.Optimizer) else made
        require(callable_, rule, shown, remedy)
        factor = self.schedule
        rule = "schedule must be a function of the visit that gives a factor"
        remedy = "such as lambda visit: 0.99**visit, in a module-level function"
        require(factor is None or callable(factor), rule, factor, remedy)

    @property
    def is_plain(self) -> bool:
        """Whether this is Algorithm 1's own step, θ − s_θ·g_θ."""
        return self == PersonalTraining()

    def train(
        self,
        theta: Vector,
        shapes: Sequence[torch.Size],
        gradient: PersonalGradient,
        *,
        step: float,
        visit: int,
    ) -> Vector:
        """θ after this visit.

        Args:
            theta: θ before it.
            shapes: of the personal parameters, in the order of θ.
            gradient: the loss and its gradient at a θ on a minibatch.
            step: s_θ; 0 leaves θ as it is.
            visit: the number of this visit.
        """
        if step == 0:
            return theta
        parameters = [nn.Parameter(part) for part in _parts(theta, shapes)]
        optimizer = self._made(parameters, step)
        self._schedule(optimizer, visit)
        for number in range(self.steps):
            minibatch = (visit - 1) * self.steps + number + 1
            self._step(optimizer, parameters, shapes, gradient, minibatch)
        return _flat(parameters)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[torch.Size],
        gradient: PersonalGradient,
        minibatch: int,
    ) -> None:
        def closure() -> float:
            now = _flat(parameters)
            loss, g_theta = gradient(now, minibatch)
            decayed = g_theta + self.weight_decay * now
            for parameter, part in zip(parameters, _parts(decayed, shapes), strict=True):
                parameter.grad = part
            return loss + 0.5 * self.weight_decay * float(now @ now)

        optimizer.step(closure)

    def _made(self, parameters: list[nn.Parameter], step: float) -> torch.optim.Optimizer:
        made = self.optimizer or torch.optim.SGD
        if isinstance(made, type):
            return made(parameters, lr=step)  # type: ignore[no-any-return]
        optimizer: Any = made(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer={made!r} returned a {type(optimizer).__name__}: return a "
                "torch.optim.Optimizer over the parameters that it is given"
            )
        return optimizer

    def _schedule(self, optimizer: torch.optim.Optimizer, visit: int) -> None:
        if self.schedule is None:
            return
        factor = self.schedule(visit)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def _parts(vector: Vector, shapes: Sequence[torch.Size]) -> list[Tensor]:
    tensor = torch.tensor(vector, dtype=torch.float64)
    parts = torch.split(tensor, [shape.numel() for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _flat(tensors: Iterable[Tensor]) -> Vector:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()
