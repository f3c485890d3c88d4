"""The client in both of Flower's APIs: one message in, one reply out.

An Order is read once, admitted, answered, and written down before the reply leaves.
"""

import functools
import logging
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import NDArrays, Scalar

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import bytes_of, vector_record
from flwr_ppsgd.client.mods import guarded_mod, refuse_clipping_mods
from flwr_ppsgd.client.refusal import REFUSED_MESSAGE, REFUSED_SECURE, RefusedError
from flwr_ppsgd.client.secure import payload_of
from flwr_ppsgd.client.visit import (
    CHECK,
    EVALUATE,
    TRAIN,
    LocalSteps,
    Visit,
    check_shared,
    num_tested,
    solver_of,
)
from flwr_ppsgd.learner import Learner, SinglePrecision
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
    SERVER_ROUND,
    Layout,
    Order,
)

log = logging.getLogger("flwr.ppsgd")

ORDER_FIELDS = ("protocol", "publishes", "clip_norm")  # no stock strategy sends one of these


# --- the Message API


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
    guarded = [guarded_mod(mod, local_step is not None) for mod in mods or []]
    return _App(learner_for, guarded, local_step, local_steps)


class _App(ClientApp):
    """A ClientApp that keeps to its owner's limits, and whose errors tell the server a code only.

    It also says what is wrong if it cannot be sent to Flower's workers.
    """

    def __init__(
        self,
        learner_for: Callable[[Context], Learner],
        mods: list[Mod],
        local_step: float | None,
        local_steps: int | None,
    ) -> None:
        super().__init__(mods=mods)
        self._learner_for = learner_for
        self._around = mods
        self._local_step = local_step
        self._local_steps = local_steps

    def __call__(self, message: Message, context: Context) -> Message:
        """Admit, answer within all mods, and write; only then does the reply leave."""
        records = message.content
        kind, _, action = message.metadata.message_type.partition(".")
        visit = Visit(context, kind, _serialised(records))
        try:
            visit.admit(records.get(ORDER), serves_stock=self._local_step is not None)
            if action:
                reply = super().__call__(message, context)
            else:
                reply = self._through_mods(message, context, visit)
            visit.write(reply.content)
            return reply
        except Exception as error:
            told = visit.fail(error)
        finally:
            visit.close()
        # raised here, where no exception is being handled: what it would bring along is sent too
        raise told

    def _through_mods(self, message: Message, context: Context, visit: Visit) -> Message:
        """The reply after all mods; a mod that writes an error would send what is in it."""
        answer: ClientAppCallable = functools.partial(self._answer, visit=visit)
        for mod in reversed(self._around):
            answer = functools.partial(_within, mod, answer)
        reply = answer(message, context)
        if reply.has_error():
            raise RuntimeError(f"a mod replied with an error: {reply.error.reason}")
        return reply

    def _answer(self, message: Message, context: Context, *, visit: Visit) -> Message:
        records = message.content
        order = visit.order
        if visit.kind == CHECK:
            reply = self._check(visit, records)
        elif visit.kind == EVALUATE:
            reply = self._evaluate(visit, records)
        elif order is None:
            reply = self._train_locally(visit, records)
        elif order.stage:
            reply = self._answer_exchange(visit, records, order)
        else:
            reply = self._train(visit, records, order)
        del context
        return Message(RecordDict(reply), reply_to=message)

    def _train(self, visit: Visit, records: RecordDict, order: Order) -> dict[str, Any]:
        """The bounded vector, private measures, and nothing else."""
        try:
            learner = self._learner_for(visit.context)
            as_sent = isinstance(learner, SinglePrecision) and learner.takes_float32
            layout, w = _shared(records, as_sent)
            check_shared(learner, layout.shape_of)
            sent = visit.train(learner, w)
        except Exception as error:
            if not visit.hides(error):
                raise
            log.exception("The client failed; the server is not told")
            return {}
        reply: dict[str, Any] = {}
        if order.asks in BEFORE_ROUNDS:
            assert sent.vector is not None
            reply[GRADIENT] = vector_record({ANSWER: sent.vector})
        elif sent.vector is not None:
            reply[GRADIENT] = layout.unflatten(sent.vector)
        if sent.measures:
            reply[METRICS] = MetricRecord({**sent.measures})
        return reply

    def _answer_exchange(self, visit: Visit, records: RecordDict, order: Order) -> dict[str, Any]:
        """One exchange of a secure sum. Data are read in the third alone."""
        payload = payload_of(records.get(SECURE), order)
        if order.stage != 3:
            return {SECURE: ConfigRecord({DATA: visit.exchange(payload)})}
        layout, w = _shared(records)
        _check_maker(self._learner_for, layout)
        words = visit.mask(payload, self._learner_for, layout, w)
        return {MASKED: vector_record({MASKED: words.astype("<u8", copy=False)})}

    def _train_locally(self, visit: Visit, records: RecordDict) -> dict[str, Any]:
        """The answer to a stock strategy, with the proximal term of FedProx if it asks for one."""
        config: Mapping[str, Any] = records.config_records.get(CONFIG, ConfigRecord())
        learner = self._learner_for(visit.context)
        local = LocalSteps.of(
            visit.context.run_config,
            self._local_step,
            self._local_steps,
            config.get("proximal-mu", 0.0),
        )
        layout, w = _shared(records)
        trained = visit.train_locally(learner, w, local)
        metrics = MetricRecord({NUM_EXAMPLES: learner.num_examples})
        return {ARRAYS: layout.unflatten(trained), METRICS: metrics}

    def _evaluate(self, visit: Visit, records: RecordDict) -> dict[str, Any]:
        """The learner's measures, outside the guarantee; an empty reply if w is only delivered."""
        _, w = _shared(records)
        if visit.delivers:
            visit.deliver(self._learner_for, w)
            return {}
        learner = self._learner_for(visit.context)
        measures = visit.measure(learner, w)
        return {METRICS: MetricRecord({**measures, NUM_EXAMPLES: num_tested(learner)})}

    def _check(self, visit: Visit, records: RecordDict) -> dict[str, Any]:
        """The Order is one that this client would obey, for this w; no data are read."""
        layout, _ = _shared(records)
        if visit.order is not None and visit.order.task:
            self._refuse_other_task(visit.context, visit.order)
        _check_maker(self._learner_for, layout)
        return {}

    def _refuse_other_task(self, context: Context, order: Order) -> None:
        """Refuse the Orders of ``auto`` to a learner that is for another task, or cannot solve.

        Whether a learner can be made is not told here: it may depend on the data.
        """
        try:
            learner = self._learner_for(context)
        except Exception:
            log.exception("The learner could not be made: this client's answers will count as zero")
            return
        try:
            solver_of(learner, order)
        except ValueError as error:
            raise RefusedError(REFUSED_MESSAGE, str(error)) from None

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


def _within(mod: Mod, answer: ClientAppCallable, message: Message, context: Context) -> Message:
    return mod(message, context, answer)


def _check_maker(learner_for: Callable[[Context], Learner], layout: Layout) -> None:
    """Refuse a w that what makes learners knows to be another model's."""
    try:
        check_shared(learner_for, layout.shape_of)
    except ValueError as error:
        raise RefusedError(REFUSED_MESSAGE, str(error)) from None


def _serialised(records: RecordDict) -> dict[str, bytes]:
    """The serialised arrays in a message, by name; none if there are none."""
    w = records.get(ARRAYS)
    return bytes_of(w) if isinstance(w, ArrayRecord) else {}


def _shared(records: RecordDict, as_sent: bool = False) -> tuple[Layout, Vector]:
    """w that came with a message, and its form; ``as_sent`` as of ``Layout.flatten``."""
    record = records.get(ARRAYS)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(
            REFUSED_MESSAGE,
            f"no ArrayRecord {ARRAYS!r} in a message that holds {sorted(records)}: let the "
            f"strategy use arrayrecord_key={ARRAYS!r}",
        )
    try:
        return Layout.read(record, as_sent)
    except ValueError as error:
        raise RefusedError(REFUSED_MESSAGE, str(error)) from None


# --- the legacy API


class PPSGDClient(NumPyClient):
    """A NumPyClient that keeps θ in ``context.state`` and sends a clipped gradient of w.

    Args:
        learner: the model with this user's data.
        context: the node's context, as ``client_fn`` gets it.
        local_step: as of ``client_app``, for stock strategies.
        local_steps: as of ``client_app``, for stock strategies.
    """

    def __init__(
        self,
        learner: Learner,
        context: Context,
        *,
        local_step: float | None = None,
        local_steps: int | None = None,
    ) -> None:
        self._learner = learner
        self._context = context
        self._local_step = local_step
        self._local_steps = local_steps

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """One visit.

        What goes back under PPSGD is the clipped gradient; 1 stands for the number of examples,
        which stays here.
        """
        visit = Visit(self._context, TRAIN, bytes_of(ArrayRecord(parameters)))
        try:
            visit.admit(_legacy_order(config), serves_stock=self._local_step is not None)
            if visit.order is None:
                arrays, examples = self._fit_locally(visit, parameters, config)
                measures: Mapping[str, float] = {}
            else:
                arrays, measures = self._train(visit, parameters, visit.order)
                examples = 1
            name = ARRAYS if visit.order is None else GRADIENT
            visit.write({name: ArrayRecord(arrays)} if arrays else {})
            return arrays, examples, {**measures}
        except Exception as error:
            told = visit.fail(error)
        finally:
            visit.close()
        raise told

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """The learner's measures, outside the guarantee."""
        visit = Visit(self._context, EVALUATE, bytes_of(ArrayRecord(parameters)))
        try:
            visit.admit(_legacy_order(config), serves_stock=self._local_step is not None)
            w = _flat(parameters)
            measures: dict[str, float] = {}
            examples = 0  # the weight of no measures
            if visit.delivers:
                visit.deliver(lambda _: self._learner, w)
            else:
                given = visit.measure(self._learner, w)
                measures = {name: float(value) for name, value in given.items()}
                examples = num_tested(self._learner)
            visit.write({METRICS: MetricRecord({**measures, NUM_EXAMPLES: examples})})
            return measures.get("loss", 0.0), examples, {**measures}
        except Exception as error:
            told = visit.fail(error)
        finally:
            visit.close()
        raise told

    def _train(
        self, visit: Visit, parameters: NDArrays, order: Order
    ) -> tuple[NDArrays, Mapping[str, float]]:
        """The bounded vector in the form of w, and private measures."""
        refuse_clipping_mods()
        if order.stage:
            raise RefusedError(
                REFUSED_SECURE, "an exchange of a secure sum in the legacy API: nothing is sent"
            )
        try:
            shapes = {str(place): array.shape for place, array in enumerate(parameters)}
            check_shared(self._learner, shapes)
            sent = visit.train(self._learner, _flat(parameters))
        except Exception as error:
            if not visit.hides(error):
                raise
            log.exception("The client failed; the server is not told")
            return [], {}
        if sent.vector is None:
            return [], {}
        if order.asks in BEFORE_ROUNDS:
            return [sent.vector], {}
        return _split(sent.vector, parameters), sent.measures

    def _fit_locally(
        self, visit: Visit, parameters: NDArrays, config: Mapping[str, Scalar]
    ) -> tuple[NDArrays, int]:
        local = LocalSteps.of(
            self._context.run_config,
            self._local_step,
            self._local_steps,
            config.get("proximal_mu", 0.0),
        )
        trained = visit.train_locally(self._learner, _flat(parameters), local)
        return _split(trained, parameters), self._learner.num_examples


def _legacy_order(config: Mapping[str, Scalar]) -> dict[str, Scalar] | None:
    """The Order among what a legacy config holds; None if a stock strategy made it."""
    if not any(name in config for name in ORDER_FIELDS):
        return None
    return {name: value for name, value in config.items() if name != SERVER_ROUND}


def _flat(arrays: NDArrays) -> Vector:
    return np.concatenate([array.reshape(-1).astype(np.float64) for array in arrays])


def _split(vector: Vector, like: NDArrays) -> NDArrays:
    """A vector in the shapes and dtypes of the arrays that came."""
    ends = np.cumsum([array.size for array in like])
    parts = zip(np.split(vector, ends[:-1]), like, strict=True)
    return [part.reshape(array.shape).astype(array.dtype) for part, array in parts]
