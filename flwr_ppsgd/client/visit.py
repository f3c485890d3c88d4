"""One visit of the server, the same for both of Flower's APIs: admitted, answered, written down.

What is sent is a function of the user's rows, θ and published values. What is kept never leaves.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
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
        self._arrays: dict[str, bytes] = {}  # w as it came, serialised
        self._policy = Policy()
        self._opened: Store | None = None
        self._factor = 1.0  # f
        self._only_delivers = False  # an evaluation that brings the last w: no measures leave
        # what ``write`` keeps
        self._theta: Theta | None = None
        self._model: Mapping[str, NDArray[Any]] | None = None
        self._exchange: ConfigRecord | None = None
        self._masked_size = 0

    # --- admit

    def admit(self, clipping_mod: str | None) -> None:
        """Read the Order, and refuse what the owner does not allow: no data are read before.

        Args:
            clipping_mod: a mod of Flower's around this client that takes every reply for trained
                parameters, if there is one.
        """
        self._policy = policy = Policy.of(self.context.node_config)
        flat = self._records.get(ORDER)
        try:
            self.order = order = None if flat is None else Order.from_flat(flat)
        except ValueError as error:
            raise RefusedError(RefusalCode.REFUSED_ORDER, str(error)) from None
        shared = self._records.get(ARRAYS)
        if isinstance(shared, ArrayRecord):
            self._arrays = bytes_of(shared)
        policy.admit(
            order,
            self.kind,
            self._arrays,
            run=self.context.run_id,
            serves_stock=self.settings.local_step is not None,
        )
        if order is None:
            return
        if clipping_mod:
            raise RefusedError(RefusalCode.REFUSED_MESSAGE, about_clipping(clipping_mod))
        if self.kind == MessageType.EVALUATE and delivers(order):
            self._only_delivers = order.asks == "nothing" or not policy.measures
            return
        facts = self._store.facts()
        known = Agreement(**facts.get(run_of(order.training), {}))
        plain = self.kind == MessageType.TRAIN and order.publishes and not order.stage
        if plain and (order.terms is not None or known.terms):
            raise RefusedError(
                RefusalCode.REFUSED_SECURE,
                "an Order without a secure sum in a training that has one: the server would see "
                "this client's vector; nothing is sent",
            )
        agreement = known.with_order(order, policy)
        DeviceAccount(**facts.get(ACCOUNT, {})).admit(order, agreement, policy)
        self._factor = agreement.factor
        if order.stage == 1:
            agreement.with_answer(order)  # else there is no point in going on

    @property
    def _store(self) -> Store:
        """Opened when it is first needed, since its name may depend on the Order."""
        if self._opened is None:
            self._opened = store_of(self.context, self.order.training if self.order else 0)
        return self._opened

    # --- answer

    def reply_to(self, message: Message, _: Context) -> Message:
        """The reply, for Flower's mods to go around."""
        return Message(RecordDict(self.answer()), reply_to=message)

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
        try:
            vector, measures = self._ask_learner(order, layout, w)
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
        if vector is not None and order.asks in BEFORE_ROUNDS:
            reply[GRADIENT] = vector_record({ANSWER: vector})
        elif vector is not None:
            reply[GRADIENT] = layout.unflatten(vector)
        if measures:
            reply[METRICS] = MetricRecord({**measures})
        return reply

    def _ask_learner(
        self, order: Order, layout: Layout, w: Vector
    ) -> tuple[Vector | None, Mapping[str, float]]:
        """The vector and the measures to send; θ after it is kept when the visit is written."""
        learner = self.settings.learner_for(self.context)
        if offers(learner, SharedChecker):
            learner.check_shared(layout.shape_of)
        if not (offers(learner, SinglePrecision) and learner.takes_float32):
            w = w.astype(np.float64, copy=False)
        if order.asks in BEFORE_ROUNDS:
            return answer_before(solver_of(learner, order), w, order, self._factor), {}
        # θ is made when the last w of the recipe comes
        initial = learner.initial_theta() if order.asks == "gradient" else np.zeros(0)
        before = theta_for(self._store, order, initial, stepping=True)
        order = fast_replace(order, visit=before.stamp.visit + 1)
        vector, measures, theta = respond(learner, w, before.theta, order, self._factor)
        self._theta = before.after_step(theta, order.round, order.average)
        return vector, measures

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
        state, partners = secure.read_partners(self.context, order, payload)
        vector = None
        measures: Mapping[str, float] = {}
        try:
            vector, measures = self._ask_learner(order, layout, w)
        except RefusedError:
            raise
        except Exception:
            log.exception("The learner failed: zero is sent, with this client's share of the noise")
        size = answer_length(order) or layout.size
        self._masked_size = size + len(order.metrics)
        x = secure.bounded_input(order, vector, measures, size, self._factor)
        words, self._exchange = secure.masked_vector(order, state, partners, x)
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
        maker = self.settings.learner_for
        if not offers(maker, SharedChecker):
            return
        try:
            maker.check_shared(layout.shape_of)
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
                    store.put_shared(self._arrays, order.promise if order else "")
                store.note(self._note(reply))
        if order is not None and order.stage:
            secure.keep_state(self.context, self._exchange)
        if isinstance(store, DiskStore):
            keep_reply_count(self.context, store)

    def _write_costs(self) -> None:
        """Count what leaves, from what is in the store now: other tasks may have written.

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
                account = DeviceAccount(**store.facts().get(ACCOUNT, {}))
                store.put_fact(ACCOUNT, vars(account.with_unpriced()))
            return
        if order is None or self.kind != MessageType.TRAIN:
            return
        sends_vector = order.stage == 3 or (order.publishes and not order.stage)
        if not (sends_vector or order.stage == 4):
            return
        is_limited = policy.needs_plan or policy.max_epsilon < math.inf
        if not (on_disk or is_limited or order.terms is not None):
            return
        facts = store.facts()
        name = run_of(order.training)
        agreement = Agreement(**facts.get(name, {})).with_order(order, policy)
        if sends_vector:
            agreement = agreement.with_answer(order)
            account = DeviceAccount(**facts.get(ACCOUNT, {}))
            account = account.with_charge(order, agreement, policy, self._masked_size)
            store.put_fact(ACCOUNT, vars(account))
        else:
            agreement = agreement.with_exchange(order, stage=4)
        store.put_fact(name, vars(agreement))

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


def about_clipping(mod: str) -> str:
    """Why a mod of Flower's that clips parameters cannot be around PPSGD, and what to do."""
    return (
        f"mods={mod} clips a reply as trained parameters, and a reply to PPSGD is a gradient, "
        f"which the server clips already: leave {mod} out of mods"
    )


# --- what is sent, and what is kept


def respond(
    learner: Learner, w: Vector, theta: Vector, order: Order, factor: float = 1.0
) -> tuple[Vector | None, Mapping[str, float], Vector]:
    """What one visit sends, a vector and private measures, and the θ after it, which is kept.

    Args:
        learner: the model with this user's data.
        w: the published parameters.
        theta: θ before the visit; empty while the recipe's rounds run.
        order: what is asked for, with the number of this visit.
        factor: f; everything that leaves is bounded by f times the Order's clip norm.
    """
    if order.asks == "solution":
        found = np.asarray(solver_of(learner, order).solution(w, order))
        g_w = found * (-1 / order.size)
        g_theta = np.zeros_like(theta)
    else:
        # as plain arrays: numpy's masked arrays would not be clipped where they are masked
        g_w, g_theta = map(np.asarray, learner.gradients(w, theta, order))
    _check_vector(learner, "g_w", g_w, w)
    _check_vector(learner, "g_θ", g_theta, theta)
    with np.errstate(all="ignore"):
        sent, stepped = client_step(theta, g_w, g_theta, factor * order.clip_norm, order.step)
    if order.asks == "gradient" and offers(learner, PersonalStepper):
        stepped = learner.personal_step(w, theta, order)
    _check_vector(learner, "a step of θ", stepped, theta)
    if not order.publishes:
        return None, {}, stepped
    measures = training_measures(learner, w, theta, order) if order.metrics else {}
    return sent, measures, stepped


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
