"""The Message-API client: w comes in, a clipped gradient goes out, θ stays."""

import logging
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import bytes_of, vector_record
from flwr_ppsgd.client.mods import guarded_mod
from flwr_ppsgd.client.refusal import REFUSED_MESSAGE, REFUSED_ORDER, RefusedError, refusing
from flwr_ppsgd.client.secure import (
    answer_keys,
    answer_masked,
    answer_revealed,
    answer_shares,
    payload_of,
    refuse_other_terms,
    refuse_plain,
)
from flwr_ppsgd.client.sent import Leaving
from flwr_ppsgd.client.visit import (
    LocalSteps,
    Request,
    Sent,
    answer_order,
    answer_stock,
    check_shared,
    hidden_failures,
    measure,
    num_tested,
    private_failures,
    serve,
    solver_of,
)
from flwr_ppsgd.learner import Learner
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
    Layout,
    Order,
    answer_length,
)

log = logging.getLogger("flwr.ppsgd")

Records: TypeAlias = Mapping[str, Any]  # of a message, by name


def client_app(
    learner_for: Callable[[Context], Learner],
    *,
    local_step: float | None = None,
    local_steps: int | None = None,
    mods: list[Mod] | None = None,
) -> ClientApp:
    """A ClientApp that serves PPSGD, and with ``local_step`` any stock strategy too.

    Args:
        learner_for: builds the learner of the node in whose context it is called. Make it a
            module-level function: Flower pickles the app with every message, and everything the
            function closes over goes along.
        local_step: the size of a step on w, in answer to a message without an Order, as stock
            strategies send it. θ is left alone; the reply is the parameters and ``num-examples``.
            If it is not given, stock strategies are answered only if the node config has
            ``ppsgd-stock = true``, with the run config's ``local-step``.
        local_steps: the number of such steps; default: the run config's ``local-steps``, or 1.
        mods: Flower client mods, applied to training and evaluation alike. Those that take every
            reply for trained parameters are refused, or kept for stock strategies.
    """
    serves_stock = local_step is not None
    guarded = [guarded_mod(mod, serves_stock) for mod in mods or []]
    app = _App(learner_for, guarded, serves_stock)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        records = message.content
        order = _order(records)
        if order is not None and order.stage:
            return _answer_stage(message, context, order, learner_for)
        if order is not None:
            refuse_plain(context, order)
            sent: Records = {}
            with hidden_failures(context, order):
                sent = _trained(records, context, learner_for(context), order)
            return Message(RecordDict({**sent}), reply_to=message)
        learner = learner_for(context)
        local = LocalSteps.of(context, local_step, local_steps)
        return _train_locally(message, context, learner, local)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        order = _order(message.content)
        if order is not None and order.asks == "nothing":
            with private_failures():
                _, w = _shared(message.content)
                measure(context, learner_for(context), w, order)
            return Message(RecordDict(), reply_to=message)
        return _evaluate(message, context, learner_for(context), order)

    @app.query()
    def check(message: Message, context: Context) -> Message:
        """The Order is one that this client would obey, for this w; no data are read."""
        records = message.content
        layout, _ = _shared(records)
        order = _order(records)
        if order is not None:
            refuse_other_terms(context, order)
            _refuse_other_task(learner_for, context, order)
        refusing(REFUSED_MESSAGE, check_shared, learner_for, layout.shape_of)
        return Message(RecordDict(), reply_to=message)

    return app


class _App(ClientApp):
    """A ClientApp that keeps to its owner's limits, and whose errors tell the server a code only.

    It also says what is wrong if it cannot be sent to Flower's workers.
    """

    def __init__(
        self,
        learner_for: Callable[[Context], Learner],
        mods: list[Mod] | None,
        serves_stock: bool,
    ) -> None:
        super().__init__(mods=mods)
        self._learner_for = learner_for
        self._serves_stock = serves_stock

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply after all mods, and only then θ for good."""
        asked = dict(message.content)  # mods may change what the client sees
        kind = message.metadata.message_type.partition(".")[0]
        order = asked.get(ORDER)
        request = Request(
            kind=kind,
            order=None if order is None else order,
            arrays=lambda: _arrays(asked),
            serves_stock=self._serves_stock,
        )
        answer = super().__call__
        return serve(
            context,
            request,
            lambda _: _without_error(answer(message, context)),
            lambda reply, order: Leaving.of(kind, reply.content, order, _arrays(asked)),
        )

    def __getstate__(self) -> dict[str, object]:
        pickler = sys.modules.get("ray.cloudpickle", pickle)
        try:
            pickler.dumps(self._learner_for)
        except Exception as error:
            raise TypeError(
                f"learner_for={self._learner_for!r} cannot be pickled for Flower's workers "
                f"({error}): make it a module-level function that opens files, locks and caches "
                "when it is called"
            ) from None
        return self.__dict__


def _refuse_other_task(
    learner_for: Callable[[Context], Learner], context: Context, order: Order
) -> None:
    """Refuse the Orders of ``auto`` to a learner that is for another task, or cannot solve.

    A learner that cannot be made is not told of here: whether it can may depend on the data.
    """
    if not order.task:
        return
    try:
        learner = learner_for(context)
    except Exception:
        log.exception("The learner could not be made: this client's answers will count as zero")
        return
    refusing(REFUSED_MESSAGE, solver_of, learner, order)


def _answer_stage(
    message: Message,
    context: Context,
    order: Order,
    learner_for: Callable[[Context], Learner],
) -> Message:
    """The answer to one exchange of a secure sum. Data are read in the third alone."""
    payload = payload_of(message.content.get(SECURE), order)
    match order.stage:
        case 1:
            data = answer_keys(context, order)
        case 2:
            data = answer_shares(context, order, payload)
        case 3:
            return _answer_masked(message, context, order, payload, learner_for)
        case _:
            data = answer_revealed(context, order, payload)
    return Message(RecordDict({SECURE: ConfigRecord({DATA: data})}), reply_to=message)


def _answer_masked(
    message: Message,
    context: Context,
    order: Order,
    payload: bytes,
    learner_for: Callable[[Context], Learner],
) -> Message:
    """The masked vector, and nothing else."""
    layout, w = _shared(message.content)
    refusing(REFUSED_MESSAGE, check_shared, learner_for, layout.shape_of)

    def train() -> Sent:
        learner = learner_for(context)
        check_shared(learner, layout.shape_of)
        return answer_order(context, learner, w, order)

    size = answer_length(order) or layout.size
    words = answer_masked(context, order, payload, size=size, train=train)
    masked = vector_record({MASKED: words.astype("<u8", copy=False)})
    return Message(RecordDict({MASKED: masked}), reply_to=message)


def _trained(asked: Records, context: Context, learner: Learner, order: Order) -> Records:
    """The answer to an Order: the clipped gradient, private measures, and nothing else."""
    as_sent = getattr(learner, "takes_float32", False)
    layout, w = _shared(asked, as_sent)
    check_shared(learner, layout.shape_of)
    sent = answer_order(context, learner, w, order)
    records: dict[str, Any] = {}
    if order.asks in BEFORE_ROUNDS:
        assert sent.vector is not None
        records[GRADIENT] = vector_record({ANSWER: sent.vector})
    elif sent.unscaled is not None:
        records[GRADIENT] = sent.record(layout)
    if sent.measures:
        records[METRICS] = MetricRecord({**sent.measures})
    return records


def _train_locally(
    message: Message, context: Context, learner: Learner, local: LocalSteps
) -> Message:
    """The answer to a stock strategy, with the proximal term of FedProx if it asks for one."""
    layout, w = _shared(message.content)
    config: Mapping[str, Any] = message.content.config_records.get(CONFIG, ConfigRecord())
    proximal = float(config.get("proximal-mu", 0.0))
    sent = answer_stock(context, learner, w, local, proximal)
    metrics = MetricRecord({NUM_EXAMPLES: learner.num_examples})
    return Message(RecordDict({ARRAYS: sent.record(layout), METRICS: metrics}), reply_to=message)


def _evaluate(message: Message, context: Context, learner: Learner, order: Order | None) -> Message:
    _, w = _shared(message.content)
    measures = measure(context, learner, w, order)
    metrics = MetricRecord({**measures, NUM_EXAMPLES: num_tested(learner)})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def _without_error(reply: Message) -> Message:
    """A reply that is no error: what a mod writes into one would be sent."""
    if reply.has_error():
        raise RuntimeError(f"a mod replied with an error: {reply.error.reason}")
    return reply


def _order(records: Records) -> Order | None:
    record = records.get(ORDER)
    if record is None:
        return None
    return refusing(REFUSED_ORDER, Order.from_flat, record)


def _arrays(records: Records) -> dict[str, bytes]:
    """The serialised arrays in a message, by name; none if there are none."""
    w = records.get(ARRAYS)
    return bytes_of(w) if isinstance(w, ArrayRecord) else {}


def _shared(records: Records, as_sent: bool = False) -> tuple[Layout, Vector]:
    """w that came with a message, and its form; ``as_sent`` as of ``Layout.flatten``."""
    record = records.get(ARRAYS)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(
            REFUSED_MESSAGE,
            f"no ArrayRecord {ARRAYS!r} in a message that holds {sorted(records)}: let the "
            f"strategy use arrayrecord_key={ARRAYS!r}",
        )
    return refusing(REFUSED_MESSAGE, Layout.read, record, as_sent)
