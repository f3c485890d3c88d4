"""One visit of the server, the same for both of Flower's APIs: admitted, answered, written down.

What is sent is a function of the user's rows, θ and published values. What is kept never leaves.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector, client_step, clip, length
from flwr_ppsgd.arrays import decode_vector
from flwr_ppsgd.checks import altered, count, require
from flwr_ppsgd.client import secure
from flwr_ppsgd.client.policy import Policy, delivers
from flwr_ppsgd.client.refusal import (
    REFUSED_ORDER,
    REFUSED_POLICY,
    REFUSED_SECURE,
    ClientError,
    DiskError,
    RefusedError,
    coded,
)
from flwr_ppsgd.client.theta import Theta, back_of
from flwr_ppsgd.client.theta_store import STATE_SEEN, DiskStore, Shared, Store, store_of, theta_for
from flwr_ppsgd.learner import (
    Learner,
    Originated,
    OwnModel,
    PersonalStepper,
    SharedChecker,
    Solver,
    Tested,
    TrainingMeasurer,
)
from flwr_ppsgd.recipe import scalar_pair
from flwr_ppsgd.secure.crypto import Words
from flwr_ppsgd.wire import BEFORE_ROUNDS, GRADIENT, Layout, Order, answer_length

log = logging.getLogger("flwr.ppsgd")

TRAIN = "train"
EVALUATE = "evaluate"
CHECK = "query"
PRECISIONS = (np.dtype(np.float32), np.dtype(np.float64))  # of what may enter a sum


class Sent(NamedTuple):
    """What a visit sends to the server, as numbers.

    Args:
        vector: the bounded gradient, solution or scalar; None if nothing is published.
        measures: training measures that the server releases privately.
    """

    vector: Vector | None
    measures: Mapping[str, float] = {}


class Visit:
    """One message to this client: admitted, answered, then written down in one transaction.

    Args:
        context: the node.
        kind: the type of the message: ``train``, ``evaluate`` or ``query``.
        arrays: w as it came, serialised, by name.
    """

    def __init__(self, context: Context, kind: str, arrays: Mapping[str, bytes]) -> None:
        self.context = context
        self.kind = kind
        self.order: Order | None = None
        self.policy = Policy()
        self.factor = 1.0
        self._arrays = arrays
        self._store: Store | None = None
        self._theta: Theta | None = None  # after this visit
        self._model: Mapping[str, NDArray[Any]] | None = None  # around the last w
        self._exchange: ConfigRecord | None = None  # what to keep of a secure sum
        self._costs = 0  # the length of the vector that leaves

    def admit(self, flat: Mapping[str, Any] | None, serves_stock: bool) -> None:
        """Read the Order, and refuse what the owner does not allow: no data are read before.

        Args:
            flat: the Order as it came; None in a message of a stock strategy.
            serves_stock: whether the app was built with ``local_step``.
        """
        self.policy = Policy.of(self.context.node_config)
        self.order = order = None if flat is None else _read_order(flat)
        run = self.context.run_id
        self.policy.admit(order, self.kind, self._arrays, run=run, serves_stock=serves_stock)
        if order is None or (self.kind == EVALUATE and delivers(order)):
            return
        known = self.store.agreement(order.training)
        plain = self.kind == TRAIN and order.publishes and not order.stage
        if plain and (order.terms is not None or known.terms):
            raise RefusedError(
                REFUSED_SECURE,
                "an Order without a secure sum in a training that has one: the server would see "
                "this client's vector; nothing is sent",
            )
        agreement = known.joined(order, self.policy)
        self.store.account().admit(order, agreement, self.policy)
        self.factor = agreement.factor
        if order.stage == 1:
            agreement.answered(order)  # else there is no point in going on

    @property
    def store(self) -> Store:
        """What this node keeps."""
        if self._store is None:
            training = self.order.training if self.order else 0
            self._store = store_of(self.context, training)
        return self._store

    def train(self, learner: Learner, w: Vector) -> Sent:
        """Serve an Order: what is sent; θ after it is kept when the visit is written."""
        order = self.order
        assert order is not None
        if order.asks in BEFORE_ROUNDS:
            sent, _ = respond(learner, w, w, order, self.factor)
        else:
            # θ is made when the last w of the recipe comes
            initial = learner.initial_theta() if order.asks == "gradient" else np.zeros(0)
            before = self._theta_for(initial, stepping=True)
            order = altered(order, visit=before.stamp.visit + 1)
            sent, theta = respond(learner, w, before.theta, order, self.factor)
            self._theta = before.stepped(theta, order.round, order.average)
        self._costs = 0 if sent.vector is None else len(sent.vector)
        return sent

    def train_locally(self, learner: Learner, w: Vector, local: "LocalSteps") -> Vector:
        """Serve a stock strategy: the trained parameters."""
        before = self._theta_for(learner.initial_theta(), stepping=False)
        trained, self._theta = local.trained(learner, w, before)
        return trained

    def measure(self, learner: Learner, w: Vector) -> dict[str, float]:
        """The learner's measures at w and this user's θ, or its average if the server asks for it.

        Under the recipe those of the personal model, of one from own rows alone (``local_…``) and
        of w alone (``shared_…``); if w is the last one, the personal model is kept.
        """
        order = self.order
        if order is not None and order.task:
            model = personal_model(learner, w, order)
            if order.last:
                self._model = model.arrays()
            return {} if self.delivers else model.measures()
        personal = self._theta_for(learner.initial_theta(), stepping=False)
        if order is not None and order.average:
            return learner.evaluate(w, personal.average(order.round))
        return learner.evaluate(w, personal.theta)

    @property
    def delivers(self) -> bool:
        """Whether an evaluation only brings the last w: no measures are asked for, or may leave."""
        if self.kind != EVALUATE or not delivers(self.order):
            return False
        assert self.order is not None
        return self.order.asks == "nothing" or not self.policy.measures

    def deliver(self, learner_for: Callable[[Context], Learner], w: Vector) -> None:
        """Keep the personal model around the last w; everybody's reply is the same.

        Whether a model can be made may depend on the user's data, and the server chooses w.
        """
        try:
            self.measure(learner_for(self.context), w)
        except Exception:
            log.exception("The personal model could not be made; the server is not told")

    def mask(
        self,
        payload: bytes,
        learner_for: Callable[[Context], Learner],
        layout: Layout,
        w: Vector,
    ) -> Words:
        """Exchange 3 of a secure sum: the masked vector.

        A learner that fails counts as zero, with its share of the noise all the same: whether it
        fails may depend on its data. What a refusal says does not, so those stay refusals.
        """
        assert self.order is not None
        masked = secure.MaskedAnswer(self.context, self.order, payload)
        sent = Sent(None)
        try:
            learner = learner_for(self.context)
            check_shared(learner, layout.shape_of)
            sent = self.train(learner, w)
        except (RefusedError, DiskError):
            raise
        except Exception:
            log.exception("The learner failed: zero is sent, with this client's share of the noise")
        size = answer_length(self.order) or layout.size
        words, self._exchange = masked.words(sent.vector, sent.measures, size, self.factor)
        self._costs = size + len(self.order.metrics)
        return words

    def exchange(self, payload: bytes) -> bytes:
        """Exchange 1, 2 or 4 of a secure sum."""
        assert self.order is not None
        data, self._exchange = secure.answer(self.context, self.order, payload)
        return data

    def hides(self, error: Exception) -> bool:
        """Whether a failure stays on this machine, which answers secure sums only.

        An Order that publishes nothing then gets the same reply whatever the learner does: whether
        it fails may depend on its data, and the server chooses w.
        """
        assert self.order is not None
        if isinstance(error, RefusedError | DiskError):
            return False
        return self.policy.secure and not self.order.publishes

    def write(self, leaving: Mapping[str, Any]) -> None:
        """Keep everything, on disk if there is one, before the reply leaves.

        Args:
            leaving: the records of the reply, by name.
        """
        order = self.order
        with self.store.writing():
            self._write_costs()
            if self._theta is not None:
                promise = order.promise if order else ""
                shared = Shared(dict(self._arrays), self._theta.stamp.round, promise)
                self.store.put_shared(shared)
                self.store.put_theta(self._theta, back_of(order))
            if self._model is not None:
                self.store.put_model(self._model)
            if self.store.on_disk:
                self.store.note(self._line(leaving))
        if order is not None and order.stage:
            self.context.state.pop(secure.STATE, None)
            if self._exchange is not None:
                self.context.state[secure.STATE] = self._exchange
        if isinstance(self.store, DiskStore):
            seen = ConfigRecord({"replies": self.store.replies()})
            self.context.state[STATE_SEEN] = seen

    def _write_costs(self) -> None:
        """Count a vector that leaves, as of what is in the store now: others may have written."""
        order = self.order
        outside = self._outside_every_epsilon()
        if order is None or (not self._costs and order.stage != 4):
            if outside and self.store.on_disk:
                self.store.put_account(self.store.account().with_unpriced())
            return
        limited = self.policy.accounts or self.policy.max_epsilon < math.inf
        if not (self.store.on_disk or order.terms is not None or limited):
            return
        account = self.store.account()
        agreement = self.store.agreement(order.training).joined(order, self.policy)
        if order.stage == 4:
            agreement = agreement.unmasked(order)
        else:
            agreement = agreement.answered(order)
            account = account.charged(order, agreement, self.policy, self._costs)
        self.store.put_agreement(order.training, agreement)
        self.store.put_account(account)

    def _outside_every_epsilon(self) -> bool:
        """Whether the reply holds something about the user that no ε covers."""
        if self.kind == EVALUATE:
            return not self.delivers
        return self.kind == TRAIN and self.order is None

    def fail(self, error: Exception) -> ClientError:
        """All that the server is told; noted on this machine if it can be."""
        told = coded(error)
        try:
            if self.store.on_disk:
                with self.store.writing():
                    self.store.note(self._line({}, told.code))
        except Exception as failure:
            log.error("This reply could not be noted: %s", failure)
        return told

    def close(self) -> None:
        """Give the store back."""
        if isinstance(self._store, DiskStore):
            self._store.close()

    def _theta_for(self, initial: Vector, *, stepping: bool) -> Theta:
        return theta_for(
            self.store, self.order, initial, stepping=stepping, run_id=self.context.run_id
        )

    def _line(self, leaving: Mapping[str, Any], code: str = "") -> dict[str, Any]:
        """What is written down about a reply."""
        gradient = leaving.get(GRADIENT)
        line: dict[str, Any] = {
            "run": self.context.run_id,
            "kind": self.kind,
            "round": None,
            "bytes": {name: _size(record) for name, record in leaving.items()},
            "norm": None if gradient is None else _norm(gradient),
            "clip_norm": None,
            "code": code,
        }
        if self.order is not None:
            line |= {"round": self.order.round, "clip_norm": self.order.clip_norm}
            if self.order.stage:
                line["stage"] = self.order.stage
        return line


def _size(record: Any) -> int:
    """The number of bytes of a record."""
    if isinstance(record, ArrayRecord):
        return sum(len(array.data) for array in record.values())
    return len(record.deflate())


def _norm(record: ArrayRecord) -> float:
    with np.errstate(all="ignore"):
        parts = [np.square(decode_vector(each), dtype=np.float64) for each in record.values()]
    return math.sqrt(sum(float(part.sum()) for part in parts))


def _read_order(flat: Mapping[str, Any]) -> Order:
    try:
        return Order.from_flat(flat)
    except ValueError as error:
        raise RefusedError(REFUSED_ORDER, str(error)) from None


# --- what is sent, and what is kept


def respond(
    learner: Learner, w: Vector, theta: Vector, order: Order, factor: float = 1.0
) -> tuple[Sent, Vector]:
    """What one visit sends, and the θ after it.

    Args:
        learner: the model with this user's data.
        w: the published parameters.
        theta: θ before the visit; empty while the recipe's rounds run.
        order: what is asked for, with the number of this visit.
        factor: f; everything that leaves is bounded by f times the Order's clip norm.
    """
    if order.asks in BEFORE_ROUNDS:
        return Sent(answer_before(solver_of(learner, order), w, order, factor)), theta
    if order.asks == "solution":
        found = np.asarray(solver_of(learner, order).solution(w, order))
        g_w = found * (-1 / order.size)
        g_theta = np.zeros_like(theta)
    else:
        # a mask, or whatever else a kind of array of its own does, is not for a bound to rest on
        g_w, g_theta = map(np.asarray, learner.gradients(w, theta, order))
    _check_form(learner, "g_w", g_w, w)
    _check_form(learner, "g_θ", g_theta, theta)
    with np.errstate(all="ignore"):
        sent, stepped = client_step(theta, g_w, g_theta, factor * order.clip_norm, order.step)
    if order.asks == "gradient" and isinstance(learner, PersonalStepper):
        stepped = learner.personal_step(w, theta, order)
    _check_form(learner, "a step of θ", stepped, theta)
    _check_finite(learner, "g_w", sent)  # it is finite if g_w is
    _check_finite(learner, "a step of θ", stepped)
    if not order.publishes:
        return Sent(None), stepped
    measures = training_measures(learner, w, theta, order) if order.metrics else {}
    return Sent(sent, measures), stepped


def answer_before(learner: Solver, w: Vector, order: Order, factor: float = 1.0) -> Vector:
    """The answer to what is asked before the first round, bounded by f times the clip norm."""
    if order.asks == "columns":
        return clip(own_columns(learner, order) / order.size, factor * order.clip_norm)
    if order.asks == "unit":
        value = learner.spread()
    elif order.asks == "size":
        origin = learner.origin(w) if isinstance(learner, Originated) else np.zeros_like(w)
        value = length(learner.solution(origin, order))
    else:
        value = math.sqrt(own_columns(learner, order).sum())
    return factor * scalar_pair(value)


def own_columns(learner: Solver, order: Order) -> Vector:
    """1 for each sparse column that the user has, else 0; ValueError if there are others."""
    own = np.asarray(learner.own_columns(), dtype=np.float64)
    if own.shape != (len(order.sparse),):
        raise ValueError(
            f"the server counts {len(order.sparse)} sparse columns and this learner has "
            f"{own.size}: give auto(sparse=…) and the learner the same columns"
        )
    return own


def solver_of(learner: object, order: Order) -> Solver:
    """The learner, which can answer ``auto``; ValueError in one line if it cannot."""
    if not isinstance(learner, Solver):
        raise ValueError(
            f"PPSGD.auto asks for solutions and {type(learner).__name__} has no solution(w, "
            "order): use AdditiveLinear or torch_client, or PPSGD(release, steps, …) for gradients"
        )
    if learner.task != order.task:
        raise ValueError(
            f"the server trains for {order.task} and this client's model is for {learner.task}: "
            f"give task={learner.task!r} to PPSGD.auto, or to the learner task={order.task!r}"
        )
    return learner


def personal_model(learner: Learner, w: Vector, order: Order) -> OwnModel:
    """The user's own model around the published w: what is kept under ``auto``."""
    variance = np.array(order.variance) if order.variance else np.zeros(1)
    return solver_of(learner, order).personal_model(w, variance, order)


def training_measures(learner: Learner, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
    """The training measures that the server releases privately; only those it names leave."""
    name = type(learner).__name__
    if not isinstance(learner, TrainingMeasurer):
        raise ValueError(
            f"the server asks for {', '.join(order.metrics)} and {name} has no "
            "training_measures(w, theta, order): add it, or leave out metrics"
        )
    given = learner.training_measures(w, theta, order)
    missing = set(order.metrics).difference(given)
    if missing:
        raise ValueError(
            f"{name} has no measure {sorted(missing)}, only {sorted(given)}: ask for those"
        )
    return {measure: float(given[measure]) for measure in order.metrics}


def num_tested(learner: Learner) -> int:
    """The weight of a user's measures: the number of rows they are measured on, if it is known."""
    return int(learner.num_tested if isinstance(learner, Tested) else learner.num_examples)


def check_shared(model: object, shapes: Mapping[str, Sequence[int]]) -> None:
    """ValueError if a learner, or what makes one, knows its shared parameters and has others.

    Args:
        model: the learner; one without ``check_shared`` takes what comes.
        shapes: of the server's arrays, by name.
    """
    if isinstance(model, SharedChecker):
        model.check_shared(shapes)


# --- stock strategies


@dataclass(frozen=True)
class LocalSteps:
    """How a stock strategy is answered: by steps on w. θ is left alone.

    Args:
        size: of a step.
        count: the number of steps.
        proximal: μ of FedProx, 0 for any other strategy.
    """

    size: float
    count: int
    proximal: float = 0.0

    @classmethod
    def of(
        cls,
        run_config: Mapping[str, Any],
        size: float | None,
        steps: int | None,
        proximal: Any,
    ) -> Self:
        """What the app says, or else the run config; RefusedError if it is wrong.

        Whether stock strategies are answered at all, no run config decides: see ``Policy``.
        """
        if size is None:
            size = run_config.get("local-step")
        if steps is None:
            steps = run_config.get("local-steps", 1)
        number = isinstance(size, int | float) and not isinstance(size, bool)
        rule = "local-step must be a positive number"
        remedy = "set it in the run config, or pass local_step to client_app"
        try:
            require(number and 0 < float(size or 0) < math.inf, rule, size, remedy)
            return cls(float(size or 0), count("local-steps", steps or 0), float(proximal))
        except ValueError as error:
            raise RefusedError(REFUSED_POLICY, str(error)) from None

    def trained(self, learner: Learner, w: Vector, theta: Theta) -> tuple[Vector, Theta]:
        """w after local steps on f_i(·, θ) + (μ/2)‖· − w‖²; each step is one visit."""
        trained = w
        for _ in range(self.count):
            order = Order(0, 0.0, math.inf, "mean", True, visit=theta.stamp.visit + 1)
            gradient, _ = learner.gradients(trained, theta.theta, order)
            _check_form(learner, "g_w", np.asarray(gradient), w)
            _check_finite(learner, "g_w", np.asarray(gradient))
            pull = self.proximal * (trained - w)
            trained = trained - self.size * (gradient + pull)
            theta = theta.stepped(theta.theta, theta.stamp.round)
        return trained, theta


def _check_form(learner: object, name: str, vector: Vector, at: Vector) -> None:
    """ValueError in one line that says what the learner did, unless the vector can be used."""
    owner = type(learner).__name__
    if vector.shape != at.shape:
        raise ValueError(
            f"{owner}.gradients returned {name} of shape {vector.shape} where the parameters have "
            f"{at.shape}: return one flat vector for each block"
        )
    if vector.dtype not in PRECISIONS:
        raise ValueError(
            f"{owner}.gradients returned {name} of dtype {vector.dtype}: return float64 or float32"
        )


def _check_finite(learner: object, name: str, vector: Vector) -> None:
    if not np.isfinite(vector).all():
        owner = type(learner).__name__
        raise ValueError(f"{owner}.gradients returned {name} that is not finite: lower the step")
