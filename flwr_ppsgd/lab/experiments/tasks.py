"""What is learnt, as each engine sees it: one user's learner, w at the start, everyone's engine.

There are three tasks: the paper's synthetic problem, a linear model on own data, and the paper's
CNN on own data. Engines, and with them scipy and torch, are loaded when they are first needed.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import DTypeLike, NDArray

from flwr_ppsgd.lab.data.synthetic import Synthetic, SyntheticLearner
from flwr_ppsgd.lab.engines.measures import VALIDATION
from flwr_ppsgd.lab.experiments.problem import AUTO, CNN, DEVICE, LINEAR, SYNTHETIC, Problem
from flwr_ppsgd.lab.experiments.rows import BASELINES, FEDAVG, OWN_TRIVIAL, TRIVIAL
from flwr_ppsgd.lab.theory import Constants
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.models.linear import Loss
from flwr_ppsgd.wire import spans_of

if TYPE_CHECKING:
    from flwr_ppsgd.lab.data.per_user import PerUser
    from flwr_ppsgd.lab.engines.batches import Population, Table
    from flwr_ppsgd.lab.engines.engine import Engine, Setting
    from flwr_ppsgd.models.additive_head import AdditiveHead

PIXELS = 28 * 28
SYNTHETIC_KEYS = ("data-seed", "features", "batch-size")
MOST_COLUMNS = 4096  # side by side; more gain nothing and would be lost together when interrupted
MOST_NETWORKS = 32
FLOAT_BYTES = 8
ROUNDS_ARE_PUBLIC = "the total number of samples, {:,}: the number of rounds follows from it"


@dataclass(frozen=True)
class Conditions:
    """What all settings that are trained side by side have in common.

    Args:
        rounds: the planned number of rounds.
        rate: the share of users that takes part in a round, on average.
        average: keep the average iterates, too.
        precision: of the engine for linear models, float64 or float32.
        dropped_after: a user drops out after this number of passes over the own samples; None is
            never.
    """

    rounds: int
    rate: float
    average: bool = False
    precision: str = "float64"
    dropped_after: float | None = None


class Task(Protocol):
    """A data set together with a model."""

    @property
    def baselines(self) -> tuple[str, ...]:
        """What the algorithm can be compared with here."""
        ...

    def learner(self, user: int) -> Learner:
        """One user's model and data."""
        ...

    def test_rows(self, user: int) -> int:
        """The number of rows on which a user is measured."""
        ...

    def choosing(self) -> "Task | None":
        """The same, measured on validation rows in place of test rows; None if there are none."""
        ...

    def user_names(self) -> Sequence[int | str]:
        """Each user's name in the data."""
        ...

    def initial_arrays(self) -> ArrayRecord:
        """w before the first round."""
        ...

    def named(self, w: ArrayRecord) -> dict[str, NDArray[Any]]:
        """w as arrays with the names that a reader knows them by."""
        ...

    def engine(
        self, settings: Sequence["Setting"], seed: int | None, conditions: Conditions
    ) -> "Engine":
        """Everyone's data and models, for the given settings side by side."""
        ...

    def bytes(self, settings: int, conditions: Conditions) -> int:
        """About how much memory a block of this number of settings takes, with the data."""
        ...

    def most_settings(self, conditions: Conditions) -> int:
        """The largest number of settings that should be trained side by side."""
        ...

    def known(self) -> dict[str, Any]:
        """The settings that follow from the data, by their flat keys."""
        ...

    def centre(self) -> float:
        """What the recipe subtracts from targets: 1/K of K classes."""
        ...

    def public(self) -> dict[str, str]:
        """The recipe's settings that the columns decide: ``task`` and ``sparse``."""
        ...

    def rounds_in(self, passes: float, rate: float, *, exhausts: bool) -> int:
        """The number of rounds in which users draw each of their samples ``passes`` times.

        Args:
            passes: over everyone's samples.
            rate: the share of users that takes part in a round, on average.
            exhausts: users drop out once they have used up their samples.
        """
        ...

    def describe(self) -> str:
        """What the data are, in lines to print; empty if there is nothing to say."""
        ...

    def trivial(self) -> dict[str, dict[str, float]]:
        """The measures of answers that use no features, by method; empty if there are none."""
        ...

    def assumed_public(self) -> list[str]:
        """What a number of rounds that was worked out from passes gives away about the data."""
        ...

    def constants(self) -> Constants:
        """What the paper's bounds ask about the problem."""
        ...


def task_of(problem: Problem, population: int) -> Task:
    """The task of a problem.

    Args:
        problem: data and model.
        population: the number of users of the synthetic problem; own data know theirs.
    """
    if problem.data == SYNTHETIC:
        return SyntheticTask(problem, population)
    if problem.model == CNN:
        return CnnTask(problem)
    return OwnLinearTask(problem)


def learner_for(context: Context) -> Learner:
    """The learner of one node; its settings travel in the run config."""
    config = context.run_config
    task = task_of(Problem.of(config), int(config["population"]))
    return task.learner(int(context.node_config["partition-id"]))


def _by_name(w: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in w.items()}


class LinearTask(Task, Protocol):
    """A task with a linear model."""

    def population(self, conditions: Conditions) -> "Population":
        """Everyone's data, for the cohort engine of linear models."""
        ...


def _linear_engine(
    task: LinearTask, settings: Sequence["Setting"], seed: int | None, conditions: Conditions
) -> "Engine":
    from flwr_ppsgd.lab.engines.linear import CohortEngine

    return CohortEngine(
        task.population(conditions),
        settings,
        seed=seed,
        rounds=conditions.rounds,
        average=conditions.average,
        dtype=conditions.precision,
    )


def _linear_bytes(task: LinearTask, settings: int, conditions: Conditions) -> int:
    from flwr_ppsgd.lab.engines.linear import bytes_for

    return bytes_for(
        task.population(conditions),
        settings,
        rounds=conditions.rounds,
        rate=conditions.rate,
        average=conditions.average,
        dtype=conditions.precision,
    )


@dataclass(frozen=True)
class SyntheticTask:
    """The paper's synthetic regression: samples are always fresh, and the truth is known."""

    problem: Problem
    users: int

    def __post_init__(self) -> None:
        foreign = [key for key in self.problem.given() if key not in SYNTHETIC_KEYS]
        if foreign:
            raise ValueError(
                f"{foreign[0]} is for data of your own: leave it out, or give data = FILE"
            )

    @property
    def baselines(self) -> tuple[str, ...]:
        """Nobody has samples of their own to fine-tune on."""
        return (FEDAVG,)

    def truth(self) -> Synthetic:
        """The problem itself, the same value for the same settings."""
        return _synthetic(self.users, self.problem.features, self.problem.data_seed)

    def learner(self, user: int) -> Learner:
        """One user's stream of fresh samples, measured against the truth."""
        return SyntheticLearner(self.truth(), user, self.problem.batch_size)

    def test_rows(self, user: int) -> int:  # noqa: ARG002
        """Everybody is measured against the truth, with the same weight."""
        return 1

    def choosing(self) -> Task | None:
        """Nothing is set apart of fresh samples."""
        return None

    def user_names(self) -> Sequence[int | str]:
        """Numbers."""
        return range(self.users)

    def named(self, w: ArrayRecord) -> dict[str, NDArray[Any]]:
        """w, one number for each feature."""
        (column,) = w.to_numpy_ndarrays()
        return {"w": column.reshape(-1)}

    def initial_arrays(self) -> ArrayRecord:
        """w = 0."""
        return ArrayRecord([np.zeros((self.problem.features, 1))])

    def population(self, conditions: Conditions) -> "Population":  # noqa: ARG002
        """Everyone's fresh samples."""
        from flwr_ppsgd.lab.engines.batches import Fresh

        return Fresh(self.truth(), self.problem.batch_size)

    def engine(
        self, settings: Sequence["Setting"], seed: int | None, conditions: Conditions
    ) -> "Engine":
        """The cohort engine for linear models."""
        return _linear_engine(self, settings, seed, conditions)

    def bytes(self, settings: int, conditions: Conditions) -> int:
        """Of w, θ and a cohort's products, with the data."""
        return _linear_bytes(self, settings, conditions)

    def most_settings(self, conditions: Conditions) -> int:  # noqa: ARG002
        """As many as the largest number of columns side by side allows."""
        return MOST_COLUMNS

    def known(self) -> dict[str, Any]:
        """Nothing follows from data that are made up."""
        return {}

    def centre(self) -> float:
        """Targets have mean 0 as they are."""
        return 0.0

    def public(self) -> dict[str, str]:
        """Nobody has rows of their own to solve on."""
        raise ValueError(
            "method = 'auto' is for users with rows of their own, and samples of the synthetic "
            "problem are always fresh: give data = FILE, or method = 'paper'"
        )

    def rounds_in(self, passes: float, rate: float, *, exhausts: bool) -> int:  # noqa: ARG002
        """There is no end to fresh samples."""
        raise ValueError(
            f"passes is for data with finitely many samples, got {passes:g}: give rounds"
        )

    def trivial(self) -> dict[str, dict[str, float]]:
        """None: the excess risk is against the optimum."""
        return {}

    def describe(self) -> str:
        """The settings say it all."""
        return ""

    def assumed_public(self) -> list[str]:
        """Nothing: the samples have no number."""
        return []

    def constants(self) -> Constants:
        """From the truth behind the data."""
        return self.truth().constants()


@functools.lru_cache(maxsize=4)
def _synthetic(users: int, features: int, seed: int) -> Synthetic:
    return Synthetic.draw(users, features, seed)


class OwnDataTask:
    """What the two tasks on own data share: the users that a file holds."""

    problem: Problem
    on_validation: bool

    def people(self) -> "PerUser":
        """Everyone's rows; if this task is for choosing, with validation rows as the test part."""
        data = self.problem.per_user()
        return data.choosing() if self.on_validation else data

    def test_rows(self, user: int) -> int:
        """The user's test part."""
        return len(self.people().rows(user, test=True))

    def user_names(self) -> Sequence[int | str]:
        """As the source has them."""
        return self.problem.per_user().users

    def known(self) -> dict[str, Any]:
        """Where the data are, their checksum, and the number of users."""
        found = self.problem.found()
        settings: dict[str, Any] = {"data": found.data, "data-checksum": found.data_checksum}
        if found.standardise:
            settings["standardise"] = found.standardise
        if found.representation == AUTO:
            settings["representation"] = found.found_representation()
        return {**settings, "population": len(found.per_user())}

    def centre(self) -> float:
        """1/K of K classes, if the loss is squared."""
        data = self.problem.per_user()
        classes = data.task != "regression" and self.problem.loss == "squared"
        linear = self.problem.model == LINEAR
        return 1 / data.outputs if classes and linear else 0.0

    def public(self) -> dict[str, str]:
        """Several labels count as classes. Only columns of a sparse table are sparse."""
        data = self.problem.per_user()
        if data.task == "regression" and data.outputs > 1:
            raise ValueError(
                f"{data.source}: method = 'auto' learns one amount and this has {data.outputs}: "
                "give one target column, or method = 'paper'"
            )
        places = [at for at, kind in enumerate(data.kinds) if kind == "sparse"]
        task = "regression" if data.task == "regression" else "classification"
        return {"task": task, "sparse": spans_of(places)}

    def rounds_in(self, passes: float, rate: float, *, exhausts: bool) -> int:
        """Σ n_i·passes over the samples that all users draw in a round on average."""
        sizes = self.problem.per_user().train_sizes
        if exhausts:
            visits = self.problem.visits_in(passes)
            assert visits is not None
            return math.ceil(float(visits.sum()) / (rate * len(sizes)))
        drawn = rate * np.minimum(sizes, self.problem.batch_size).sum()
        return max(1, round(passes * float(sizes.sum() / drawn)))

    def trivial(self) -> dict[str, dict[str, float]]:
        """Everyone's mean or most frequent class, and each user's own."""
        from flwr_ppsgd.lab.data.look import trivial

        data = self.problem.per_user()
        found: dict[str, dict[str, float]] = {TRIVIAL: {}, OWN_TRIVIAL: {}}
        parts = {"": data} if data.validation is None else {"": data, VALIDATION: data.choosing()}
        for prefix, part in parts.items():
            answer = trivial(part)
            if answer is not None:
                found[TRIVIAL][prefix + answer.measure] = answer.pooled
                found[OWN_TRIVIAL][prefix + answer.measure] = answer.own
        return {method: measures for method, measures in found.items() if measures}

    def describe(self) -> str:
        """The users and their rows."""
        from flwr_ppsgd.lab.data.look import brief

        data = self.problem.per_user()
        minibatch = 1 if self.problem.scale == DEVICE else self.problem.batch_size
        return "\n".join([data.describe(minibatch), *brief(data)])

    def assumed_public(self) -> list[str]:
        """The total number of samples."""
        samples = int(self.problem.per_user().train_sizes.sum())
        return [ROUNDS_ARE_PUBLIC.format(samples)]

    def constants(self) -> Constants:
        """Nobody knows them for data that were not made up."""
        raise ValueError(
            "alpha_q 'theory' is for the synthetic problem, whose constants are known: give a "
            "number"
        )


@dataclass(frozen=True)
class OwnLinearTask(OwnDataTask):
    """(w + θ_i)ᵀx on data of one's own."""

    problem: Problem
    on_validation: bool = False

    @property
    def baselines(self) -> tuple[str, ...]:
        """All of them."""
        return BASELINES

    def choosing(self) -> Task | None:
        """With the validation rows, if any are set apart."""
        apart = self.problem.per_user().validation is not None
        return replace(self, on_validation=True) if apart else None

    def learner(self, user: int) -> Learner:
        """One user's rows, with a linear model."""
        from flwr_ppsgd.lab.data.learners import linear_learner

        return linear_learner(
            self.people(),
            user,
            batch_size=self.problem.batch_size,
            seed=self.problem.data_seed,
            loss=_loss_of(self.problem),
            shift=self.problem.target_shift,
        )

    def named(self, w: ArrayRecord) -> dict[str, NDArray[Any]]:
        """w: features × outputs."""
        (matrix,) = w.to_numpy_ndarrays()
        return {"w": matrix}

    def initial_arrays(self) -> ArrayRecord:
        """w = 0, features × outputs."""
        data = _checked(self.problem)
        return ArrayRecord([np.zeros((data.features, data.outputs))])

    def population(self, conditions: Conditions) -> "Table":
        """Everyone's rows."""
        return table(self.problem, conditions.precision, conditions.dropped_after)

    def engine(
        self, settings: Sequence["Setting"], seed: int | None, conditions: Conditions
    ) -> "Engine":
        """The cohort engine for linear models."""
        return _linear_engine(self, settings, seed, conditions)

    def bytes(self, settings: int, conditions: Conditions) -> int:
        """Of w, θ and a cohort's products, with the data."""
        return _linear_bytes(self, settings, conditions)

    def most_settings(self, conditions: Conditions) -> int:
        """As many as the largest number of columns side by side allows."""
        return max(1, MOST_COLUMNS // self.population(conditions).outputs)


def check_squared(problem: Problem) -> None:
    """ValueError unless personal models can be made around w, which is of the squared loss."""
    if problem.loss != "squared":
        raise ValueError(
            f"personal models are made around a w of the squared loss, and this one is of "
            f"{problem.loss}: train with loss = 'squared'"
        )


def _loss_of(problem: Problem) -> Loss:
    return cast(Loss, problem.loss)


def _checked(problem: Problem) -> "PerUser":
    """The users; ValueError if the loss does not go with their targets."""
    from flwr_ppsgd.lab.data.learners import check_loss

    data = problem.per_user()
    check_loss(data, _loss_of(problem), problem.target_shift)
    return data


@functools.lru_cache(maxsize=1)
def table(problem: Problem, dtype: DTypeLike, dropped_after: float | None = None) -> "Table":
    """Everyone's rows, for the cohort engine of linear models.

    Args:
        problem: own data, with a linear model.
        dtype: of features and targets.
        dropped_after: as of ``Conditions``.
    """
    from flwr_ppsgd.lab.engines.batches import Table

    data = _checked(problem)
    x, y, offsets = data.part(test=False, shift=problem.target_shift, dtype=dtype)
    test = data.part(test=True, shift=problem.target_shift, dtype=dtype)
    validation = None
    if data.validation is not None:
        apart = data.choosing()
        validation = apart.part(test=True, shift=problem.target_shift, dtype=dtype)
    return Table(
        x,
        y,
        offsets,
        batch_size=problem.batch_size,
        seed=problem.data_seed,
        loss=_loss_of(problem),
        test=test,
        validation=validation,
        task=data.task,
        most_visits=problem.visits_in(dropped_after),
        units=data.units,
    )


@dataclass(frozen=True)
class CnnTask(OwnDataTask):
    """The paper's CNN on images of one's own. Only this task loads torch."""

    problem: Problem
    on_validation: bool = False

    def __post_init__(self) -> None:
        if (self.problem.loss, self.problem.target_shift) != ("squared", 0.0):
            raise ValueError(
                f"the cnn has a loss of its own, with targets shifted by .1, got "
                f"{self.problem.loss!r} and {self.problem.target_shift:g}: leave out loss and "
                "target-shift"
            )

    @property
    def baselines(self) -> tuple[str, ...]:
        """They are written for linear models."""
        return ()

    def choosing(self) -> Task | None:
        """With the validation rows, if any are set apart."""
        apart = self.problem.per_user().validation is not None
        return replace(self, on_validation=True) if apart else None

    def learner(self, user: int) -> Learner:
        """One user's images, with the network."""
        from flwr_ppsgd.lab.data.learners import network_learner

        return network_learner(
            self.network(),
            self.people(),
            user,
            batch_size=self.problem.batch_size,
            seed=self.problem.data_seed,
        )

    def named(self, w: ArrayRecord) -> dict[str, NDArray[Any]]:
        """By the names of the network's parameters."""
        return _by_name(w)

    def initial_arrays(self) -> ArrayRecord:
        """The network's first values, which depend on the seed alone."""
        return self.network().initial_arrays()

    def network(self) -> "AdditiveHead":
        """The paper's CNN; ValueError if the data are no images that it fits."""
        data = self.problem.per_user()
        if data.features != PIXELS or data.task != "classification":
            raise ValueError(
                f"{data.source}: the cnn is for classes of images of 28 × 28 = {PIXELS} pixels and "
                f"this has {data.features} features, {data.task}: use model = 'linear'"
            )
        return _network(self.problem.data_seed, data.outputs)

    def engine(
        self, settings: Sequence["Setting"], seed: int | None, conditions: Conditions
    ) -> "Engine":
        """The cohort engine for networks."""
        from flwr_ppsgd.lab.data.learners import NetworkBatches
        from flwr_ppsgd.lab.engines.networks import NetworkEngine

        data = self.problem.per_user()
        batches = []
        tests: list[Any] = []
        validation: list[Any] = []
        for user in range(len(data)):
            own = NetworkBatches(
                data, user, self.problem.batch_size, seed=self.problem.data_seed, shift=0.0
            )
            batches.append(own)
            tests.append(_measured_rows(data, user))
            if data.validation is not None:
                validation.append(_measured_rows(data.choosing(), user))
        return NetworkEngine(
            self.network(),
            batches,
            settings,
            seed=seed,
            average=conditions.average,
            tests=tests,
            validation=validation,
            most_visits=self.problem.visits_in(conditions.dropped_after),
        )

    def bytes(self, settings: int, conditions: Conditions) -> int:  # noqa: ARG002
        """θ of every user and w for each setting, and a cohort's gradients."""
        model = self.network()
        users = len(self.problem.per_user())
        w = len(model.initial_w())
        theta = len(model.initial_theta())
        kept = settings * (2 * users * theta + 4 * w)
        gradients = 16 * w * users
        return FLOAT_BYTES * (kept + gradients)

    def most_settings(self, conditions: Conditions) -> int:  # noqa: ARG002
        """Networks share their minibatches and noise; more side by side gain little."""
        return MOST_NETWORKS


def _measured_rows(data: "PerUser", user: int) -> tuple[Any, Any]:
    """(x, y) of one user's test part, for a network."""
    from flwr_ppsgd.lab.data.learners import network_targets

    rows = data.rows(user, test=True)
    return data.matrix(rows), network_targets(data, rows)


@functools.lru_cache(maxsize=1)
def _network(seed: int, classes: int) -> "AdditiveHead":
    from flwr_ppsgd.lab.cnn import paper_cnn

    return paper_cnn(seed, classes)
