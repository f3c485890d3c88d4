"""What the server does with a released gradient: values and pure steps.

What was released is public, so everything here is free post-processing. The server also knows how
much noise it has added, and :class:`Adam` makes use of that. An optimizer is a value; its state is
a mapping of named vectors that a checkpoint can hold.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np

from flwr_ppsgd.algorithm import Release, Vector, descend
from flwr_ppsgd.checks import count, one_of, require

State: TypeAlias = Mapping[str, Vector]
Course: TypeAlias = Literal["constant", "linear", "cosine", "inverse-root"]

ENDING = ("linear", "cosine")  # courses that are over after a number of rounds
COUNT = "count"  # the number of steps so far, in every state
LEAST_ROOT = 1e-5  # of C, the least that Adam divides by: a coordinate without signal or noise


@dataclass(frozen=True)
class Released:
    """What a round has published, as the optimizer sees it.

    Args:
        total: the noisy sum of one round.
        release: C and D.
        noise_std: the standard deviation of the noise that was really added to the mean.
        clip_norm: C of this round.
    """

    total: Vector
    release: Release
    noise_std: float
    clip_norm: float

    @property
    def mean(self) -> Vector:
        """The noisy sum over D."""
        return self.total / self.release.denominator


@dataclass(frozen=True)
class Schedule:
    """By which factor the step of each round is multiplied.

    Args:
        course: "constant"; "linear" and "cosine" fall to 0 after ``rounds``; "inverse-root" is
            1/√t.
        rounds: the number of rounds after which "linear" and "cosine" are over.
        warm_up: over this number of rounds the factor rises from 0, whatever the course.
    """

    course: Course = "constant"
    rounds: int | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        one_of("course", self.course, get_args(Course))
        ends = self.course in ENDING
        if ends and self.rounds is None:
            raise ValueError(f"course {self.course!r} needs rounds: give the planned number")
        if self.rounds is not None:
            count("rounds", self.rounds)
        rule = "warm_up must be a whole number that is not negative"
        require(self.warm_up >= 0, rule, self.warm_up, "0 is none")

    def factor(self, done: int) -> float:
        """Of the step after ``done`` steps."""
        rising = min(1.0, (done + 1) / (self.warm_up + 1))
        if self.course == "inverse-root":
            return rising / math.sqrt(done + 1)
        if self.rounds is None or self.course == "constant":
            return rising
        left = max(0.0, 1 - done / self.rounds)
        if self.course == "linear":
            return rising * left
        return rising * 0.5 * (1 - math.cos(math.pi * left))


CONSTANT = Schedule()


class Optimizer(Protocol):
    """How w moves by what was released."""

    def initial(self, size: int) -> State:
        """The state before the first round, for ``size`` shared parameters."""
        ...

    def moved(
        self, w: Vector, released: Released, step: float, state: State
    ) -> tuple[Vector, State]:
        """w after one step of size ``step`` times the schedule's factor, and the new state."""
        ...


@dataclass(frozen=True)
class SGD:
    """w − s·ḡ, the paper's step (Algorithms 1–3, last line).

    Args:
        schedule: of the step.
    """

    schedule: Schedule = CONSTANT

    def initial(self, size: int) -> State:  # noqa: ARG002
        """The number of steps."""
        return {COUNT: np.zeros(1)}

    def moved(
        self, w: Vector, released: Released, step: float, state: State
    ) -> tuple[Vector, State]:
        """One plain step."""
        scaled = step * self.schedule.factor(_done(state))
        return descend(w, released.total, released.release, scaled), {COUNT: state[COUNT] + 1}


PLAIN = SGD()


@dataclass(frozen=True)
class Momentum:
    """m ← βm + ḡ, w − s·m; with ``nesterov``, w − s·(ḡ + βm).

    Args:
        beta: β in [0, 1).
        nesterov: look ahead.
        schedule: of the step.
    """

    beta: float = 0.9
    nesterov: bool = False
    schedule: Schedule = CONSTANT

    def __post_init__(self) -> None:
        require(0 <= self.beta < 1, "beta must be in [0, 1)", self.beta, "0.9 is usual")

    def initial(self, size: int) -> State:
        """No motion."""
        return {COUNT: np.zeros(1), "motion": np.zeros(size)}

    def moved(
        self, w: Vector, released: Released, step: float, state: State
    ) -> tuple[Vector, State]:
        """One step along the motion so far."""
        mean = released.mean
        with np.errstate(all="ignore"):  # a step too large ends in infinity, not in a warning
            motion = self.beta * state["motion"] + mean
            direction = mean + self.beta * motion if self.nesterov else motion
            after = w - step * self.schedule.factor(_done(state)) * direction
        return after, {COUNT: state[COUNT] + 1, "motion": motion}


@dataclass(frozen=True)
class Adam:
    """Adam that knows its noise: w − s·m̂ / √max(v̂ − σ̂², σ̂², (10⁻⁵·C)²).

    v̂ holds the noise besides the signal, so its share σ̂² is taken out: the same bias-corrected
    average of the variances σ_t² that were really added. Where nothing but noise is left, σ̂²
    itself is the floor: such a coordinate moves little, and one rate serves every ε.

    Args:
        beta1: of the mean m.
        beta2: of the squares v, and of the noise's variance.
        schedule: of the step.
        corrected: take the noise out; False is plain Adam.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    schedule: Schedule = CONSTANT
    corrected: bool = True

    def __post_init__(self) -> None:
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= value < 1, f"{name} must be in [0, 1)", value, "0.9 and 0.99 are usual")

    def initial(self, size: int) -> State:
        """Nothing seen yet."""
        return {
            COUNT: np.zeros(1),
            "mean": np.zeros(size),
            "squares": np.zeros(size),
            "noise": np.zeros(1),
        }

    def moved(
        self, w: Vector, released: Released, step: float, state: State
    ) -> tuple[Vector, State]:
        """One step, each coordinate in units of its own signal."""
        mean = released.mean
        with np.errstate(all="ignore"):
            after = {
                COUNT: state[COUNT] + 1,
                "mean": _averaged(state["mean"], mean, self.beta1),
                "squares": _averaged(state["squares"], mean**2, self.beta2),
                "noise": _averaged(state["noise"], released.noise_std**2, self.beta2),
            }
            direction = self._direction(after, released.clip_norm)
            return w - step * self.schedule.factor(_done(state)) * direction, after

    def _direction(self, state: State, clip_norm: float) -> Vector:
        steps = _done(state)
        mean = state["mean"] / (1 - self.beta1**steps)
        unbiased = 1 - self.beta2**steps
        squares = state["squares"] / unbiased
        noise = float(state["noise"][0]) / unbiased if self.corrected else 0.0
        floor = max(noise, (LEAST_ROOT * clip_norm) ** 2)
        direction: Vector = mean / np.sqrt(np.maximum(squares - noise, floor))
        return direction


def _averaged(before: Vector, now: Vector | float, beta: float) -> Vector:
    averaged: Vector = beta * before + (1 - beta) * now
    return averaged


def _done(state: State) -> int:
    return int(state[COUNT][0])
