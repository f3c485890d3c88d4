"""The client in both of Flower's APIs: one message in, one reply out.

An Order is read once, admitted, answered, and written down before the reply leaves.
"""

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.client import NumPyClient
from flwr.client.mod import make_ffn
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import NDArrays, Scalar

from flwr_ppsgd.client.refusal import RefusalCode, RefusedError
from flwr_ppsgd.client.visit import ClientSettings, Visit, about_clipping
from flwr_ppsgd.flower_wrappers import MODS, flower_caller
from flwr_ppsgd.learner import Learner
from flwr_ppsgd.wire import (
    ARRAYS,
    CONFIG,
    GRADIENT,
    METRICS,
    NUM_EXAMPLES,
    ORDER,
    SERVER_ROUND,
)

ORDER_FIELDS = ("protocol", "publishes", "clip_norm")  # no stock strategy sends one of these


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
    if not callable(learner_for):
        rule = "learner_for must be a function that builds the learner of a node"
        remedy = "write a module-level function that takes a Context and returns the learner"
        raise ValueError(f"{rule}, got a {type(learner_for).__name__}: {remedy}")
    clipping = _clipping_mod(mods or [])
    if clipping and local_step is None:
        remedy = "or set local_step to serve stock strategies too"
        raise ValueError(f"{about_clipping(clipping)}, {remedy}")
    settings = ClientSettings(learner_for, local_step, local_steps)
    return _GuardedClientApp(settings, mods or [], clipping)


class _GuardedClientApp(ClientApp):
    """A ClientApp that keeps to its owner's limits, and whose errors tell the server a code only.

    It also says what is wrong if it cannot be sent to Flower's workers.

    Args:
        settings: of ``client_app``.
        mods: around every answer.
        clipping: the name of one of them that must not get a gradient, if there is one.
    """

    def __init__(self, settings: ClientSettings, mods: list[Mod], clipping: str | None) -> None:
        super().__init__(mods=mods)
        self._settings = settings
        self._around = mods
        self._clipping = clipping

    def __call__(self, message: Message, context: Context) -> Message:
        """Admit, answer within all mods, and write; only then does the reply leave."""
        kind, _, action = message.metadata.message_type.partition(".")
        visit = Visit(self._settings, context, kind, message.content)
        try:
            visit.admit(self._clipping)
            if action:  # that somebody registered with this app
                reply = super().__call__(message, context)
            else:
                reply = make_ffn(visit.reply_to, self._around)(message, context)
            if reply.has_error():  # as a mod wrote it: the server would see all that is in it
                raise RuntimeError(f"a mod replied with an error: {reply.error.reason}")
            visit.write(reply.content)
            return reply
        except Exception as error:
            failure = visit.fail(error)
        finally:
            visit.close()
        # raised here, where no exception is being handled: what it would bring along is sent too
        raise failure

    def __getstate__(self) -> dict[str, object]:
        pickler = sys.modules.get("ray.cloudpickle", pickle)
        learner_for = self._settings.learner_for
        try:
            pickler.dumps(learner_for)
        except Exception as error:
            raise TypeError(
                f"learner_for={learner_for!r} cannot be pickled for Flower's workers "
                f"({error}): make it a module-level function that opens files, locks and caches "
                "when it is called"
            ) from None
        return self.__dict__


def _clipping_mod(mods: list[Mod]) -> str | None:
    """The name of a mod of Flower's, of either API, that takes a reply for trained parameters."""
    for mod in mods:
        for each in (mod, *type(mod).__mro__):
            name = getattr(each, "__name__", "")
            if name in MODS and str(each.__module__).startswith("flwr."):
                return str(name)
    return None


class PPSGDClient(NumPyClient):
    """A NumPyClient that keeps θ in ``context.state`` and sends a clipped gradient of w.

    Args:
        learner: the model with this user's data.
        context: the node's context, as ``client_fn`` gets it.
        local_step: for stock strategies; see ``client_app``.
        local_steps: for stock strategies; see ``client_app``.
    """

    def __init__(
        self,
        learner: Learner,
        context: Context,
        *,
        local_step: float | None = None,
        local_steps: int | None = None,
    ) -> None:
        self._settings = ClientSettings(lambda _: learner, local_step, local_steps)
        self._context = context

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """One visit.

        What goes back under PPSGD is the clipped gradient; 1 stands for the number of examples,
        which stays here.
        """
        reply = self._reply(MessageType.TRAIN, parameters, config)
        metrics = dict(reply.get(METRICS, {}))
        if ARRAYS in reply:
            return reply[ARRAYS].to_numpy_ndarrays(), metrics[NUM_EXAMPLES], {}
        gradient = reply.get(GRADIENT, ArrayRecord())
        return gradient.to_numpy_ndarrays(), 1, metrics

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """The learner's measures, outside the guarantee; 0 is the weight of none."""
        reply = self._reply(MessageType.EVALUATE, parameters, config)
        measures = dict(reply.get(METRICS, {}))
        examples = measures.pop(NUM_EXAMPLES, 0)
        return measures.get("loss", 0.0), examples, measures

    def _reply(
        self, kind: str, parameters: NDArrays, config: Mapping[str, Scalar]
    ) -> Mapping[str, Any]:
        """The records of the reply: admitted, answered and written down as those of a message."""
        records: dict[str, Any] = {ARRAYS: ArrayRecord(parameters)}
        if any(name in config for name in ORDER_FIELDS):
            records[ORDER] = {key: value for key, value in config.items() if key != SERVER_ROUND}
        else:
            records[CONFIG] = {"proximal-mu": config.get("proximal_mu", 0.0)}
        visit = Visit(self._settings, self._context, kind, records)
        try:
            visit.admit(flower_caller(MODS))
            if visit.order is not None and visit.order.stage:
                reason = "a secure sum in the legacy API: nothing is sent"
                raise RefusedError(RefusalCode.REFUSED_SECURE, reason)
            reply = visit.answer()
            visit.write(reply)
            return reply
        except Exception as error:
            failure = visit.fail(error)
        finally:
            visit.close()
        raise failure
