"""The Message-API client: w comes in, a clipped gradient goes out, θ stays."""

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from flwr_ppsgd.client.personal import all_or_nothing
from flwr_ppsgd.client.sent import Leaving
from flwr_ppsgd.client.visit import LocalSteps, answer_order, answer_stock, measure
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.wire import (
    ARRAYS,
    CONFIG,
    GRADIENT,
    METRICS,
    NUM_EXAMPLES,
    ORDER,
    Layout,
    Order,
    bytes_of,
)


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
            If it is not given, the run config's ``local-step`` is taken.
        local_steps: the number of such steps; default: the run config's ``local-steps``, or 1.
        mods: Flower client mods, applied to training and evaluation alike.
    """
    app = _App(learner_for, mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        learner = learner_for(context)
        if ORDER in message.content:
            return _train(message, context, learner)
        local = LocalSteps.of(context, local_step, local_steps)
        return _train_locally(message, context, learner, local)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(message, context, learner_for(context))

    return app


class _App(ClientApp):
    """A ClientApp that says what is wrong if it cannot be sent to Flower's workers."""

    def __init__(self, learner_for: Callable[[Context], Learner], mods: list[Mod] | None) -> None:
        super().__init__(mods=mods)
        self._learner_for = learner_for

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply after all mods, and only then θ for good."""
        asked = message.content.copy()  # mods may change what the client sees
        answer = super().__call__
        return all_or_nothing(
            context,
            lambda: answer(message, context),
            lambda reply: _leaving(reply, asked),
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


def _train(message: Message, context: Context, learner: Learner) -> Message:
    """The answer to an Order: the clipped gradient, private measures, and nothing else."""
    record = _shared(message)
    layout = Layout.of(record)
    order = Order.from_flat(_order_record(message))
    sent = answer_order(context, learner, layout.flatten(record), order)
    content = RecordDict()
    if sent.vector is not None:
        content[GRADIENT] = layout.unflatten(sent.vector)
    if sent.measures:
        content[METRICS] = MetricRecord({**sent.measures})
    return Message(content, reply_to=message)


def _train_locally(
    message: Message, context: Context, learner: Learner, local: LocalSteps
) -> Message:
    """The answer to a stock strategy, with the proximal term of FedProx if it asks for one."""
    record = _shared(message)
    layout = Layout.of(record)
    config: Mapping[str, Any] = message.content.config_records.get(CONFIG, ConfigRecord())
    proximal = float(config.get("proximal-mu", 0.0))
    sent = answer_stock(context, learner, layout.flatten(record), local, proximal)
    assert sent.vector is not None
    metrics = MetricRecord({NUM_EXAMPLES: learner.num_examples})
    content = RecordDict({ARRAYS: layout.unflatten(sent.vector), METRICS: metrics})
    return Message(content, reply_to=message)


def _evaluate(message: Message, context: Context, learner: Learner) -> Message:
    record = _shared(message)
    w = Layout.of(record).flatten(record)
    measures = measure(context, learner, w, _order(message.content))
    metrics = MetricRecord({**measures, NUM_EXAMPLES: learner.num_examples})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def _leaving(reply: Message, asked: RecordDict) -> Leaving:
    """What a reply takes along, and what it answers."""
    w = asked.get(ARRAYS)
    arrays = bytes_of(w) if isinstance(w, ArrayRecord) else {}
    content = reply.content if reply.has_content() else RecordDict()
    return Leaving.of(content, _order(asked), arrays)


def _order(content: RecordDict) -> Order | None:
    record = content.get(ORDER)
    return Order.from_flat(record) if isinstance(record, ConfigRecord) else None


def _order_record(message: Message) -> ConfigRecord:
    record = message.content.get(ORDER)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"{ORDER!r} is a {type(record).__name__} where a ConfigRecord is expected")
    return record


def _shared(message: Message) -> ArrayRecord:
    record = message.content.get(ARRAYS)
    if not isinstance(record, ArrayRecord):
        raise ValueError(
            f"no ArrayRecord {ARRAYS!r} in a message that holds {sorted(message.content)}: let the "
            f"strategy use arrayrecord_key={ARRAYS!r}"
        )
    return record
