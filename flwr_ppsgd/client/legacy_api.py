"""The legacy NumPyClient: the same visit as the Message API's client."""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.common import NDArrays, Scalar

from flwr_ppsgd.algorithm import Vector
from flwr_ppsgd.arrays import bytes_of
from flwr_ppsgd.client.mods import refuse_clipping_mods
from flwr_ppsgd.client.secure import refuse_plain
from flwr_ppsgd.client.sent import EVALUATE, Leaving, norm_of
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
)
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.wire import ARRAYS, BEFORE_ROUNDS, GRADIENT, METRICS, SERVER_ROUND, Order

TRAIN = "train"
ORDER_FIELDS = ("protocol", "publishes", "clip_norm")  # no stock strategy sends one of these


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

        def answer(order: Order | None) -> tuple[NDArrays, int, dict[str, Scalar]]:
            w = _flat(parameters)
            if order is None:
                sent = self._fit_locally(w, config)
                return _arrays(sent, parameters), self._learner.num_examples, {}
            refuse_clipping_mods()
            refuse_plain(self._context, order)
            sent = Sent(None)
            with hidden_failures(self._context, order):
                shapes = {str(place): array.shape for place, array in enumerate(parameters)}
                check_shared(self._learner, shapes)
                sent = answer_order(self._context, self._learner, w, order)
            if order.asks in BEFORE_ROUNDS:
                assert sent.vector is not None
                return [sent.vector], 1, {}
            return _arrays(sent, parameters), 1, {**sent.measures}

        return serve(
            self._context,
            self._request(TRAIN, parameters, config),
            answer,
            lambda reply, order: _leaving(reply[0], order, _serialised(parameters)),
        )

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """The learner's measures, outside the guarantee."""

        def answer(order: Order | None) -> tuple[float, int, dict[str, Scalar]]:
            if order is not None and order.asks == "nothing":
                with private_failures():
                    measure(self._context, self._learner, _flat(parameters), order)
                return 0.0, 1, {}
            measures = measure(self._context, self._learner, _flat(parameters), order)
            numbers = {name: float(value) for name, value in measures.items()}
            return numbers.get("loss", 0.0), num_tested(self._learner), {**numbers}

        def leaving(reply: tuple[float, int, dict[str, Scalar]], order: Order | None) -> Leaving:
            size = 8 * len(reply[2]) + 8
            return Leaving(EVALUATE, {METRICS: size}, order=order)

        return serve(
            self._context,
            self._request(EVALUATE, parameters, config),
            answer,
            leaving,
        )

    def _request(self, kind: str, parameters: NDArrays, config: Mapping[str, Scalar]) -> Request:
        order: dict[str, Scalar] | None = None
        if any(name in config for name in ORDER_FIELDS):
            order = {name: value for name, value in config.items() if name != SERVER_ROUND}
        return Request(
            kind=kind,
            order=order,
            arrays=lambda: _serialised(parameters),
            serves_stock=self._local_step is not None,
        )

    def _fit_locally(self, w: Vector, config: Mapping[str, Scalar]) -> Sent:
        local = LocalSteps.of(self._context, self._local_step, self._local_steps)
        proximal = float(config.get("proximal_mu", 0.0))
        return answer_stock(self._context, self._learner, w, local, proximal)


def _leaving(arrays: NDArrays, order: Order | None, w: Mapping[str, bytes]) -> Leaving:
    """What a reply takes along, and what it answers."""
    if not arrays:
        return Leaving(TRAIN, order=order, w=w)
    size = sum(array.nbytes for array in arrays)
    if order is None:
        return Leaving(TRAIN, {ARRAYS: size}, w=w)
    return Leaving(TRAIN, {GRADIENT: size}, norm_of(arrays), order, w)


def _serialised(parameters: NDArrays) -> dict[str, bytes]:
    """The arrays as they travelled, under the names 0, 1, 2, …"""
    return bytes_of(ArrayRecord(parameters))


def _flat(arrays: NDArrays) -> Vector:
    return np.concatenate([array.reshape(-1).astype(np.float64) for array in arrays])


def _arrays(sent: Sent, like: NDArrays) -> NDArrays:
    """What is sent, in the shapes and dtypes of the arrays that came."""
    if sent.vector is None:
        return []
    ends = np.cumsum([array.size for array in like])
    parts = np.split(sent.vector, ends[:-1])
    pairs = zip(parts, like, strict=True)
    return [part.reshape(array.shape).astype(array.dtype) for part, array in pairs]
