"""The task of an experiment: one user's learner, the initial w, and the cohort engine.

A linear model on the paper's synthetic problem or on own data, or the paper's CNN on own data.
Engines, and with them scipy and torch, are imported when they are first needed.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from flwr_ppsgd.lab.problem import CNN, SYNTHETIC, Problem
from flwr_ppsgd.lab.synthetic import Synthetic, SyntheticLearner
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.models.additive_linear import Loss

if TYPE_CHECKING:
    from flwr_ppsgd.lab.engine import Engine, EngineSetting
    from flwr_ppsgd.lab.per_user import PerUser
    from flwr_ppsgd.lab.population import FinitePopulation, Population
    from flwr_ppsgd.models.torch_model import AdditiveHead

PIXELS = 28 * 28
SYNTHETIC_KEYS = ("data-seed", "features", "batch-size")
MOST_SETTINGS = 128  # side by side: more gain little, and a kill loses a whole block
MOST_COLUMNS = 4096  # settings × outputs
MOST_NETWORKS = 8
FLOAT_BYTES = 8


@dataclass(frozen=True)
class LinearTask:
    """(w + θ_i)ᵀx.

    Args:
        problem: the synthetic problem, or own data with a linear model.
        users: the number of users of the synthetic problem; unused for own data.
        average: keep the average iterates, too.
        precision: of the engine, float64 or float32.
        dropped_after: the number of passes over the own samples after which a user drops out;
            None: never.
    """

    problem: Problem
    users: int
    average: bool = False
    precision: str = "float64"
    dropped_after: float | None = None

    def __post_init__(self) -> None:
        foreign = [key for key in self.problem.changed_keys() if key not in SYNTHETIC_KEYS]
        if self.problem.data == SYNTHETIC and foreign:
            raise ValueError(
                f"{foreign[0]} is for data of your own: leave it out, or give data = FILE"
            )

    def learner(self, user: int, *, on_validation: bool = False) -> Learner:
        """One user's model and data, measured on test rows or on validation rows."""
        problem = self.problem
        if problem.data == SYNTHETIC:
            truth = _synthetic_problem(self.users, problem.features, problem.data_seed)
            return SyntheticLearner(truth, user, problem.batch_size)
        from flwr_ppsgd.lab.learners import linear_learner

        return linear_learner(
            _learner_rows(problem, on_validation),
            user,
            batch_size=problem.batch_size,
            seed=problem.data_seed,
            loss=cast(Loss, problem.loss),
            shift=problem.target_shift,
        )

    def initial_arrays(self) -> ArrayRecord:
        """w = 0, features × outputs."""
        if self.problem.data == SYNTHETIC:
            return ArrayRecord([np.zeros((self.problem.features, 1))])
        from flwr_ppsgd.lab.learners import check_loss

        data = self.problem.per_user()
        check_loss(data, cast(Loss, self.problem.loss), self.problem.target_shift)
        return ArrayRecord([np.zeros((data.features, data.outputs))])

    def population(self) -> "Population":
        """Everyone's data, for engines of linear models."""
        problem = self.problem
        if problem.data != SYNTHETIC:
            return finite_population(problem, self.precision, self.dropped_after)
        from flwr_ppsgd.lab.population import FreshPopulation

        truth = _synthetic_problem(self.users, problem.features, problem.data_seed)
        return FreshPopulation(truth, problem.batch_size)

    def engine(self, settings: Sequence["EngineSetting"], seed: int | None) -> "Engine":
        """Everyone's data and models, for the given settings side by side."""
        from flwr_ppsgd.lab.linear_engine import LinearEngine

        return LinearEngine(
            self.population(), settings, seed=seed, average=self.average, dtype=self.precision
        )

    def bytes(self, settings: int) -> int:
        """The approximate memory of an engine with this number of settings, with the data."""
        from flwr_ppsgd.lab.linear_engine import bytes_for

        return bytes_for(self.population(), settings, average=self.average, dtype=self.precision)

    def recipe_bytes(self) -> int:
        """The approximate memory of a training by the recipe, with the data.

        For each user: the model that the device keeps, the rows in the columns that are not 0 (a
        second time in the kernels of the model, if they are dense), and their factorisation.
        """
        from flwr_ppsgd.lab.population import array_bytes

        data = self.problem.per_user()
        sizes = data.train_sizes
        copies = 1 if data.is_sparse else 2
        columns = np.full(len(data), data.features)
        if data.is_sparse:
            for user in range(len(data)):
                columns[user] = len(np.unique(data.x[data.span(user)].indices))
        rows = copies * sizes * columns + np.minimum(sizes, columns) ** 2
        numbers = len(data) * data.features * data.outputs + int(rows.sum())
        return FLOAT_BYTES * numbers + array_bytes(data.x)

    @property
    def most_settings(self) -> int:
        """The largest number of settings that should be trained side by side."""
        return max(1, min(MOST_SETTINGS, MOST_COLUMNS // self.population().outputs))


@dataclass(frozen=True)
class NetworkTask:
    """The paper's CNN on own images; arguments and methods are those of ``LinearTask``."""

    problem: Problem
    average: bool = False
    dropped_after: float | None = None
    most_settings = MOST_NETWORKS

    def __post_init__(self) -> None:
        if (self.problem.loss, self.problem.target_shift) != ("squared", 0.0):
            raise ValueError(
                f"the cnn has a loss of its own, with targets shifted by .1, got "
                f"{self.problem.loss!r} and {self.problem.target_shift:g}: leave out loss and "
                "target-shift"
            )

    def network(self) -> "AdditiveHead":
        """The paper's CNN; ValueError unless the data are classes of images of its size."""
        data = self.problem.per_user()
        if data.features != PIXELS or data.task != "classification":
            raise ValueError(
                f"{data.source}: the cnn is for classes of images of 28 × 28 = {PIXELS} pixels and "
                f"this has {data.features} features, {data.task}: use model = 'linear'"
            )
        return _paper_network(self.problem.data_seed, data.outputs)

    def learner(self, user: int, *, on_validation: bool = False) -> Learner:
        """One user's model and data, measured on test rows or on validation rows."""
        from flwr_ppsgd.lab.learners import network_learner

        return network_learner(
            self.network(),
            _learner_rows(self.problem, on_validation),
            user,
            batch_size=self.problem.batch_size,
            seed=self.problem.data_seed,
        )

    def initial_arrays(self) -> ArrayRecord:
        """The network's initial values, which follow from the seed."""
        return self.network().initial_arrays()

    def engine(self, settings: Sequence["EngineSetting"], seed: int | None) -> "Engine":
        """Everyone's data and models, for the given settings side by side."""
        from flwr_ppsgd.lab.learners import NetworkBatches, network_rows
        from flwr_ppsgd.lab.network_engine import NetworkEngine

        problem = self.problem
        data = problem.per_user()
        users = range(len(data))
        validation: list[tuple[NDArray[Any], NDArray[Any]]] = []
        if data.validation is not None:
            choosing = data.validation_as_test()
            validation = [network_rows(choosing, choosing.rows(user, test=True)) for user in users]
        return NetworkEngine(
            self.network(),
            [NetworkBatches(data, user, problem.batch_size, problem.data_seed) for user in users],
            settings,
            seed=seed,
            average=self.average,
            tests=[network_rows(data, data.rows(user, test=True)) for user in users],
            validation=validation,
            most_visits=problem.visits_in(self.dropped_after),
        )

    def bytes(self, settings: int) -> int:
        """The approximate memory of all θ and w, and of a cohort's gradients."""
        model = self.network()
        users = len(self.problem.per_user())
        w = len(model.initial_w())
        kept = settings * (2 * users * len(model.initial_theta()) + 4 * w)
        return FLOAT_BYTES * (kept + 16 * w * users)

    def recipe_bytes(self) -> int:
        """The approximate memory of one setting, with the w and the θ that each device keeps."""
        users = len(self.problem.per_user())
        return self.bytes(1) + FLOAT_BYTES * users * len(self.network().initial_w())


AnyTask: TypeAlias = LinearTask | NetworkTask


def task_of(
    problem: Problem,
    population: int,
    *,
    average: bool = False,
    precision: str = "float64",
    dropped_after: float | None = None,
) -> AnyTask:
    """The task of a problem; the arguments are those of ``LinearTask``."""
    if problem.model == CNN and problem.data != SYNTHETIC:
        return NetworkTask(problem, average, dropped_after)
    return LinearTask(problem, population, average, precision, dropped_after)


def learner_for(context: Context) -> Learner:
    """The learner of one node, from the settings in the run config."""
    config = context.run_config
    task = task_of(Problem.of(config), int(config["population"]))
    return task.learner(int(context.node_config["partition-id"]))


def _learner_rows(problem: Problem, on_validation: bool) -> "PerUser":
    """Everyone's rows; with validation rows as the test part if ``on_validation``."""
    data = problem.per_user()
    return data.validation_as_test() if on_validation else data


@functools.lru_cache(maxsize=4)
def _synthetic_problem(users: int, features: int, seed: int) -> Synthetic:
    return Synthetic.draw(users, features, seed)


@functools.lru_cache(maxsize=1)
def finite_population(
    problem: Problem, precision: str, dropped_after: float | None = None
) -> "FinitePopulation":
    """Everyone's rows of own data for engines; the arguments are those of ``LinearTask``."""
    from flwr_ppsgd.lab.learners import check_loss
    from flwr_ppsgd.lab.population import FinitePopulation

    data = problem.per_user()
    loss = cast(Loss, problem.loss)
    shift = problem.target_shift
    check_loss(data, loss, shift)
    x, y, offsets = data.part(test=False, shift=shift, dtype=precision)
    validation = None
    if data.validation is not None:
        validation = data.validation_as_test().part(test=True, shift=shift, dtype=precision)
    return FinitePopulation(
        x,
        y,
        offsets,
        batch_size=problem.batch_size,
        seed=problem.data_seed,
        loss=loss,
        test=data.part(test=True, shift=shift, dtype=precision),
        validation=validation,
        task=data.task,
        most_visits=problem.visits_in(dropped_after),
        units=data.units,
    )


@functools.lru_cache(maxsize=1)
def _paper_network(seed: int, classes: int) -> "AdditiveHead":
    from flwr_ppsgd.lab.cnn import paper_cnn

    return paper_cnn(seed, classes)
