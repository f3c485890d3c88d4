"""One visit of the server, the same for both of Flower's APIs: admitted, answered, written down.

What is sent is a function of the user's rows, θ and published values. What is kept never leaves.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MessageType, MetricRecord
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import Vector, client_step, clip, length
from flwr_ppsgd.arrays import Layout, bytes_of, decode, vector_record
from flwr_ppsgd.checks import count, fast_replace, is_number, require
from flwr_ppsgd.client import secure
from flwr_ppsgd.client.account import Agreement, DeviceAccount
from flwr_ppsgd.client.policy import Policy, delivers
from flwr_ppsgd.client.refusal import (
    ClientError,
    RefusalCode,
    RefusedError,
    error_for_server,
    limit_refusal,
)
from flwr_ppsgd.client.theta import Theta
from flwr_ppsgd.client.theta_store import (
    ACCOUNT,
    DiskStore,
    Store,
    keep_reply_count,
    run_of,
    store_of,
    theta_for,
)
from flwr_ppsgd.learner import (
    Learner,
    OriginProvider,
    OwnModel,
    PersonalStepper,
    SharedChecker,
    SinglePrecision,
    Solver,
    TestedRowCounter,
    TrainingMeasurer,
    offers,
)
from flwr_ppsgd.noise import PRECISIONS
from flwr_ppsgd.recipe import scalar_pair
from flwr_ppsgd.wire import (
    ANSWER,
    ARRAYS,
    BEFORE_ROUNDS,
    CONFIG,
    DATA,
    GRADIENT,
    MASKED,
    METRICS,
    NUM_EXAMPLES,
    ORDER,
    SECURE,
    Order,
    answer_length,
)

log = logging.getLogger("flwr.ppsgd")


class VisitAnswer(NamedTuple):
    """What a visit sends to the server, as numbers.

    Args:
        vector: the bounded gradient, solution or scalar; None if nothing is published.
        measures: training measures that the server releases privately.
    """

    vector: Vector | None
    measures: Mapping[str, float] = {}


@dataclass(frozen=True)
class ClientSettings:
    """What an app was built with; see ``client_app``."""

    learner_for: Callable[[Context], Learner]
    local_step: float | None = None
    local_steps: int | None = None


class Visit:
    """One message to this client: ``admit``, ``answer``, ``write``; or ``fail``. Then ``close``.

    Args:
        settings: of the app.
        context: the node.
        kind: the type of the message: ``train``, ``evaluate`` or ``query``.
        records: its content.
    """

    def __init__(
        self, settings: ClientSettings, context: Context, kind: str, records: Mapping[str, Any]
    ) -> None:
        self.settings = settings
        self.context = context
        self.kind = kind
        self.order: Order | None = None
        self._records = records
        self._policy = Policy()
        self._factor = 1.0
        self._opened: Store | None = None
        self._publishes = False  # once data are read for a vector
        self._size = 0  # of a masked vector
        self._theta: Theta | None = None  # after this visit
        self._model: Mapping[str, NDArray[Any]] | None = None  # around the last w
        self._exchange: ConfigRecord | None = None  # what to keep of a secure sum

    # --- admit

    def admit(self) -> None:
        """Read the Order, and refuse what the owner does not allow: no data are read before."""
        self._policy = policy = Policy.of(self.context.node_config)
        flat = self._records.get(ORDER)
        try:
            self.order = order = None if flat is None else Order.from_flat(flat)
        except ValueError as error:
            raise RefusedError(RefusalCode.REFUSED_ORDER, str(error)) from None
        policy.admit(
            order,
            self.kind,
            self._arrays(),
            run=self.context.run_id,
            serves_stock=self.settings.local_step is not None,
        )
        if order is None or (self.kind == MessageType.EVALUATE and delivers(order)):
            return
        known = self._agreement(order)
        plain = self.kind == MessageType.TRAIN and order.publishes and not order.stage
        if plain and (order.terms is not None or known.terms):
            raise RefusedError(
                RefusalCode.REFUSED_SECURE,
                "an Order without a secure sum in a training that has one: the server would see "
                "this client's vector; nothing is sent",
            )
        agreement = known.with_order(order, policy)
        self._account().admit(order, agreement, policy)
        self._factor = agreement.factor
        if order.stage == 1:
            agreement.with_answer(order)  # else there is no point in going on

    @property
    def _store(self) -> Store:
        if self._opened is None:
            self._opened = store_of(self.context, self.order.training if self.order else 0)
        return self._opened

    def _agreement(self, order: Order) -> Agreement:
        return Agreement(**(self._store.fact(run_of(order.training)) or {}))

    def _account(self) -> DeviceAccount:
        return DeviceAccount(**(self._store.fact(ACCOUNT) or {}))

    def _arrays(self) -> dict[str, bytes]:
        """w as it came, serialised, by name."""
        record = self._records.get(ARRAYS)
        return bytes_of(record) if isinstance(record, ArrayRecord) else {}

    # --- answer

    def answer(self) -> dict[str, Any]:
        """The records of the reply."""
        if self.kind == MessageType.QUERY:
            return self._check()
        if self.kind == MessageType.EVALUATE:
            return self._evaluate()
        if self.order is None:
            return self._train_locally()
        if self.order.stage:
            return self._answer_exchange(self.order)
        return self._train(self.order)

    def _train(self, order: Order) -> dict[str, Any]:
        """The bounded vector, private measures, and nothing else."""
        layout, w = self._read_shared()
        self._publishes = order.publishes
        try:
            sent = self._ask_learner(order, layout, w)
        except RefusedError:
            raise
        except Exception:
            hides = self._policy.secure or self._policy.limits_own
            if order.publishes or not hides:
                raise
            # whether a learner fails may depend on its data, the server chooses w, and no account
            # would count it
            log.exception("The client failed; the server is not told")
            return {}
        reply: dict[str, Any] = {}
        if sent.vector is not None and order.asks in BEFORE_ROUNDS:
            reply[GRADIENT] = vector_record({ANSWER: sent.vector})
        elif sent.vector is not None:
            reply[GRADIENT] = layout.unflatten(sent.vector)
        if sent.measures:
            reply[METRICS] = MetricRecord({**sent.measures})
        return reply

    def _ask_learner(self, order: Order, layout: Layout, w: Vector) -> VisitAnswer:
        """What the learner sends; θ after it is kept when the visit is written."""
        learner = self.settings.learner_for(self.context)
        _check_shared(learner, layout)
        if not (offers(learner, SinglePrecision) and learner.takes_float32):
            w = w.astype(np.float64, copy=False)
        if order.asks in BEFORE_ROUNDS:
            sent, _ = respond(learner, w, w, order, self._factor)
            return sent
        # θ is made when the last w of the recipe comes
        initial = learner.initial_theta() if order.asks == "gradient" else np.zeros(0)
        before = theta_for(self._store, order, initial, stepping=True)
        order = fast_replace(order, visit=before.stamp.visit + 1)
        sent, theta = respond(learner, w, before.theta, order, self._factor)
        self._theta = before.after_step(theta, order.round, order.average)
        return sent

    def _answer_exchange(self, order: Order) -> dict[str, Any]:
        """One exchange of a secure sum. Data are read in the third alone.

        There a learner that fails counts as zero, with its share of the noise all the same: whether
        it fails may depend on its data. What a refusal says does not, so those stay refusals.
        """
        payload = secure.payload_of(self._records.get(SECURE), order)
        if order.stage != 3:
            data, self._exchange = secure.answer(self.context, order, payload)
            return {SECURE: ConfigRecord({DATA: data})}
        layout, w = self._read_shared()
        self._check_maker(layout)
        masked = secure.MaskedAnswer(self.context, order, payload)
        sent = VisitAnswer(None)
        try:
            sent = self._ask_learner(order, layout, w)
        except RefusedError:
            raise
        except Exception:
            log.exception("The learner failed: zero is sent, with this client's share of the noise")
        size = answer_length(order) or layout.size
        self._publishes = True
        self._size = size + len(order.metrics)
        words, self._exchange = masked.words(sent.vector, sent.measures, size, self._factor)
        return {MASKED: vector_record({MASKED: words.astype("<u8", copy=False)})}

    def _train_locally(self) -> dict[str, Any]:
        """The answer to a stock strategy, with the proximal term of FedProx if it asks for one."""
        layout, w = self._read_shared()
        w = w.astype(np.float64, copy=False)
        step, steps = local_steps(self.settings, self.context.run_config)
        proximal = float(self._records.get(CONFIG, {}).get("proximal-mu", 0.0))
        learner = self.settings.learner_for(self.context)
        theta = theta_for(self._store, None, learner.initial_theta(), stepping=False)
        trained = w
        for _ in range(steps):  # on f_i(·, θ) + (μ/2)‖· − w‖²; each step is one visit
            order = Order.own_step(0.0, theta.stamp.visit + 1, publishes=True)
            gradient, _ = learner.gradients(trained, theta.theta, order)
            _check_vector(learner, "g_w", np.asarray(gradient), w)
            pull = proximal * (trained - w)
            trained = trained - step * (gradient + pull)
            theta = theta.after_step(theta.theta, theta.stamp.round)
        self._theta = theta
        metrics = MetricRecord({NUM_EXAMPLES: learner.num_examples})
        return {ARRAYS: layout.unflatten(trained), METRICS: metrics}

    def _evaluate(self) -> dict[str, Any]:
        """The learner's measures, outside the guarantee; an empty reply if w is only delivered.

        Whether a personal model can be made may depend on the user's data, and the server chooses
        w: everybody's reply to a delivery is the same.
        """
        _, w = self._read_shared()
        try:
            learner = self.settings.learner_for(self.context)
            measures = self._measures(learner, w.astype(np.float64, copy=False))
        except Exception:
            if not self._only_delivers:
                raise
            log.exception("The personal model could not be made; the server is not told")
        if self._only_delivers:
            return {}
        return {METRICS: MetricRecord({**measures, NUM_EXAMPLES: num_tested(learner)})}

    @property
    def _only_delivers(self) -> bool:
        """Whether an evaluation only brings the last w: no measures are asked for, or may leave."""
        if self.order is None or not delivers(self.order):
            return False
        return self.order.asks == "nothing" or not self._policy.measures

    def _measures(self, learner: Learner, w: Vector) -> dict[str, float]:
        """The learner's measures at w and this user's θ, or its average if the server asks for it.

        Under the recipe those of the personal model, of one from own rows alone (``local_…``) and
        of w alone (``shared_…``); if w is the last one, the personal model is kept.
        """
        order = self.order
        if order is not None and order.task:
            model = model_around(learner, w, order)
            if order.last:
                self._model = model.arrays()
            return {} if self._only_delivers else model.measures()
        personal = theta_for(self._store, order, learner.initial_theta(), stepping=False)
        if order is not None and order.average:
            return learner.evaluate(w, personal.average(order.round))
        return learner.evaluate(w, personal.theta)

    def _check(self) -> dict[str, Any]:
        """The Order is one that this client would obey, for this w and this task.

        Whether a learner can be made is not told: it may depend on the data.
        """
        layout, _ = self._read_shared()
        self._check_maker(layout)
        if self.order is None or not self.order.task:
            return {}
        try:
            learner = self.settings.learner_for(self.context)
        except Exception:
            log.exception("The learner could not be made: this client's answers will count as zero")
            return {}
        try:
            solver_of(learner, self.order)
        except ValueError as error:
            raise RefusedError(RefusalCode.REFUSED_MESSAGE, str(error)) from None
        return {}

    def _check_maker(self, layout: Layout) -> None:
        """Refuse a w that what makes learners knows to be another model's."""
        try:
            _check_shared(self.settings.learner_for, layout)
        except ValueError as error:
            raise RefusedError(RefusalCode.REFUSED_MESSAGE, str(error)) from None

    def _read_shared(self) -> tuple[Layout, Vector]:
        """w that came with the message, in float32 if it travels so, and its form."""
        record = self._records.get(ARRAYS)
        if not isinstance(record, ArrayRecord):
            raise RefusedError(
                RefusalCode.REFUSED_MESSAGE,
                f"no ArrayRecord {ARRAYS!r} in a message that holds {sorted(self._records)}: let "
                f"the strategy use arrayrecord_key={ARRAYS!r}",
            )
        try:
            layout = Layout.of(record)
            return layout, layout.flatten(record, as_sent=True)
        except ValueError as error:
            raise RefusedError(RefusalCode.REFUSED_MESSAGE, str(error)) from None

    # --- write

    def write(self, reply: Mapping[str, Any]) -> None:
        """Keep everything, on disk if there is one, before the reply leaves.

        Args:
            reply: its records.
        """
        order = self.order
        store = self._store
        with store.writing():
            self._write_costs()
            if self._theta is not None:
                store.put_theta(self._theta, order)
            if self._model is not None:
                store.put_model(self._model)
            if isinstance(store, DiskStore):
                if self._theta is not None:
                    store.put_shared(self._arrays(), order.promise if order else "")
                store.note(self._note(reply))
        if order is not None and order.stage:
            secure.keep_state(self.context, self._exchange)
        if isinstance(store, DiskStore):
            keep_reply_count(self.context, store)

    def _write_costs(self) -> None:
        """Count what leaves, as of what is in the store now: others may have written.

        In a node's own state, which is lost with the run, only what a limit or a secure sum needs.
        """
        order = self.order
        store = self._store
        policy = self._policy
        on_disk = isinstance(store, DiskStore)
        is_measured = self.kind == MessageType.EVALUATE and not self._only_delivers
        answers_stock = self.kind == MessageType.TRAIN and order is None
        if is_measured or answers_stock:
            if on_disk:
                store.put_fact(ACCOUNT, vars(self._account().with_unpriced()))
            return
        if order is None or not (self._publishes or order.stage == 4):
            return
        is_limited = policy.needs_plan or policy.max_epsilon < math.inf
        if not (on_disk or is_limited or order.terms is not None):
            return
        agreement = self._agreement(order).with_order(order, policy)
        if order.stage == 4:
            agreement = agreement.with_exchange(order, stage=4)
        else:
            agreement = agreement.with_answer(order)
            account = self._account().with_charge(order, agreement, policy, self._size)
            store.put_fact(ACCOUNT, vars(account))
        store.put_fact(run_of(order.training), vars(agreement))

    def fail(self, error: Exception) -> ClientError:
        """All that the server is told; noted on this machine if it can be.

        Under a limit a learner that fails is counted as if it had answered: otherwise how often it
        fails, which may depend on its data, would decide when the limit is reached.
        """
        failure = error_for_server(error)
        try:
            if isinstance(self._store, DiskStore):
                with self._store.writing():
                    if self._policy.limits_own and failure.code == RefusalCode.LEARNER_FAILED:
                        self._write_costs()
                    self._store.note(self._note({}, failure.code))
        except Exception as problem:
            log.error("This reply could not be noted: %s", problem)
        return failure

    def close(self) -> None:
        """Give the store back."""
        if isinstance(self._opened, DiskStore):
            self._opened.close()

    def _note(self, reply: Mapping[str, Any], code: str = "") -> dict[str, Any]:
        """What is written down about a reply."""
        order = self.order
        sizes = {}
        for name, record in reply.items():
            if isinstance(record, ArrayRecord):
                sizes[name] = sum(len(array.data) for array in record.values())
            else:
                sizes[name] = len(record.deflate())
        return {
            "run": self.context.run_id,
            "kind": self.kind,
            "round": order.round if order else None,
            "bytes": sizes,
            "norm": _norm(reply[GRADIENT]) if GRADIENT in reply else None,
            "clip_norm": order.clip_norm if order else None,
            "code": code,
        }


def _norm(record: ArrayRecord) -> float:
    squares = 0.0
    with np.errstate(all="ignore"):
        for array in record.values():
            squares += float(np.square(decode(array), dtype=np.float64).sum())
    return math.sqrt(squares)


def local_steps(settings: ClientSettings, run_config: Mapping[str, Any]) -> tuple[float, int]:
    """The size and the number of a stock strategy's steps: the app's, or else the run config's.

    Whether stock strategies are answered at all, no run config decides: see ``Policy``.
    """
    step: Any = settings.local_step
    if step is None:
        step = run_config.get("local-step")
    steps: Any = settings.local_steps
    if steps is None:
        steps = run_config.get("local-steps", 1)
    rule = "local-step must be a positive number"
    remedy = "set it in the run config, or pass local_step to client_app"
    try:
        require(is_number(step) and 0 < step < math.inf, rule, step, remedy)
        return float(step), count("local-steps", steps)
    except ValueError as error:
        raise limit_refusal(str(error)) from None


# --- what is sent, and what is kept


def respond(
    learner: Learner, w: Vector, theta: Vector, order: Order, factor: float = 1.0
) -> tuple[VisitAnswer, Vector]:
    """What one visit sends, and the θ after it.

    Args:
        learner: the model with this user's data.
        w: the published parameters.
        theta: θ before the visit; empty while the recipe's rounds run.
        order: what is asked for, with the number of this visit.
        factor: f; everything that leaves is bounded by f times the Order's clip norm.
    """
    if order.asks in BEFORE_ROUNDS:
        return VisitAnswer(answer_before(solver_of(learner, order), w, order, factor)), theta
    if order.asks == "solution":
        found = np.asarray(solver_of(learner, order).solution(w, order))
        g_w = found * (-1 / order.size)
        g_theta = np.zeros_like(theta)
    else:
        # a mask, or whatever else a kind of array of its own does, is not for a bound to rest on
        g_w, g_theta = map(np.asarray, learner.gradients(w, theta, order))
    _check_vector(learner, "g_w", g_w, w)
    _check_vector(learner, "g_θ", g_theta, theta)
    with np.errstate(all="ignore"):
        sent, stepped = client_step(theta, g_w, g_theta, factor * order.clip_norm, order.step)
    if order.asks == "gradient" and offers(learner, PersonalStepper):
        stepped = learner.personal_step(w, theta, order)
    _check_vector(learner, "a step of θ", stepped, theta)
    if not order.publishes:
        return VisitAnswer(None), stepped
    measures = training_measures(learner, w, theta, order) if order.metrics else {}
    return VisitAnswer(sent, measures), stepped


def answer_before(learner: Solver, w: Vector, order: Order, factor: float = 1.0) -> Vector:
    """The answer to what is asked before the first round, bounded by f times the clip norm."""
    if order.asks == "unit":
        return factor * scalar_pair(learner.spread())
    if order.asks == "size":
        origin = learner.origin(w) if offers(learner, OriginProvider) else np.zeros_like(w)
        return factor * scalar_pair(length(learner.solution(origin, order)))
    columns = np.asarray(learner.own_columns(), dtype=np.float64)
    if columns.shape != (order.sparse,):
        raise ValueError(
            f"the server counts {order.sparse} sparse columns and this learner has "
            f"{columns.size}: give auto(sparse=…) and the learner the same columns"
        )
    if order.asks == "count":
        return factor * scalar_pair(math.sqrt(columns.sum()))
    return clip(columns / order.size, factor * order.clip_norm)


def solver_of(learner: object, order: Order) -> Solver:
    """The learner, which can answer ``auto``; ValueError in one line if it cannot."""
    if not offers(learner, Solver):
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


def model_around(learner: object, w: Vector, order: Order) -> OwnModel:
    """The user's own model around the published w: what is kept under ``auto``."""
    variance = np.array(order.variance) if order.variance else np.zeros(1)
    return solver_of(learner, order).personal_model(w, variance, order)


def training_measures(learner: Learner, w: Vector, theta: Vector, order: Order) -> dict[str, float]:
    """The training measures that the server releases privately; only those it names leave."""
    name = type(learner).__name__
    if not offers(learner, TrainingMeasurer):
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
    if offers(learner, TestedRowCounter):
        return int(learner.num_tested)
    return int(learner.num_examples)


def _check_shared(model: object, layout: Layout) -> None:
    """ValueError if a learner, or what makes one, knows its shared parameters and has others."""
    if offers(model, SharedChecker):
        model.check_shared(layout.shape_of)


def _check_vector(learner: object, name: str, vector: Vector, at: Vector) -> None:
    """ValueError in one line that says what the learner did, unless the vector can be used."""
    did = f"{type(learner).__name__}.gradients returned {name}"
    if vector.shape != at.shape:
        raise ValueError(
            f"{did} of shape {vector.shape} where the parameters have {at.shape}: return one flat "
            "vector for each block"
        )
    if vector.dtype not in PRECISIONS:
        raise ValueError(f"{did} of dtype {vector.dtype}: return float64 or float32")
    if not np.isfinite(vector).all():
        raise ValueError(f"{did} that is not finite: lower the step")
