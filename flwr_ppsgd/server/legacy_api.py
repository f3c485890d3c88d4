"""Flower's legacy API: the same curator behind ``flwr.server.strategy.Strategy``, the same visit in a NumPyClient."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, NDArrays, Parameters, Scalar
from flwr.server import ServerConfig
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from flwr_ppsgd import promise as statement
from flwr_ppsgd.algorithm import Release, Steps, Vector
from flwr_ppsgd.client.message_api import Learner, LocalSteps, local_training, personal_of, theta_to_evaluate, visit
from flwr_ppsgd.client.personal import all_or_nothing, keep, mirror, step_from
from flwr_ppsgd.client.sent import Leaving, norm_of
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.enrolment import Enrolment, Identity, Present, present_in
from flwr_ppsgd.server.message_api import mean_of
from flwr_ppsgd.server.rounds import OpenRound, UnusableError, not_configured, order_for
from flwr_ppsgd.server.tensorboard import Scalars
from flwr_ppsgd.settings import Settings
from flwr_ppsgd.wire import ARRAYS, GRADIENT, METRICS, NUM_EXAMPLES, NUMPY, Layout, Order, record_of

log = logging.getLogger("flwr.ppsgd")


class _Asked(list[Any]):
    """A list that is always true: Flower's legacy loop skips a round whose list is empty, but this round still
    releases."""

    def __bool__(self) -> bool:
        return True


class PPSGDStrategy(Strategy):
    """PPSGD for ``ServerApp(server_fn=…)``. The arguments are those of ``PPSGD``, without ``replies`` and ``metrics``.

    initial_parameters: w before the first round; required, so that no client is asked for it.

    The legacy loop always counts from 1 and cannot end early. Give it
    ``strategy.server_config(total)``: what is left of the total after the rounds found in ``checkpoint_dir``, and
    within the budget, each round with its timeout. Without that, an exhausted budget ends the run with Flower's
    ``PrivacyBudgetExhausted``.
    """

    def __init__(
        self,
        *,
        release: Release,
        steps: Steps,
        delta: float,
        initial_parameters: Parameters,
        max_epsilon: float | None = None,
        evaluate_every: int = 0,
        enrolled: Iterable[str] | None = None,
        min_online: float = 0.5,
        round_timeout: float = 3600.0,
        average: bool = False,
        checkpoint_dir: Path | str | None = None,
        checkpoint_every: int = 1,
        tensorboard_dir: Path | str | None = None,
        insecure_seed: int | None = None,
    ) -> None:
        if not isinstance(initial_parameters, Parameters):
            raise ValueError(
                f"initial_parameters must be flwr.common.Parameters, got {type(initial_parameters).__name__}: pass "
                "ndarrays_to_parameters([...]) with the initial w"
            )
        self._curator = Curator(
            release,
            steps,
            delta=delta,
            max_epsilon=max_epsilon,
            insecure_seed=insecure_seed,
            average=average,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        if not round_timeout > 0:
            raise ValueError(f"round_timeout must be positive, got {round_timeout!r}: it is in seconds")
        self._scalars = Scalars(tensorboard_dir)
        self.round_timeout = round_timeout
        self._enrolment = Enrolment(release.cohort.population, enrolled, min_online)
        self._layout = Layout.of(record_of(initial_parameters.tensors))
        self._first = self._curator.rounds_done
        found = self._curator.resumed
        self._initial = initial_parameters if found is None else Parameters(list(found.arrays.values()), NUMPY)
        self._flatten(self._initial.tensors)  # a checkpoint of another model is refused here
        if evaluate_every < 0:
            raise ValueError(f"evaluate_every must not be negative, got {evaluate_every!r}: 0 is never")
        self.evaluate_every = evaluate_every
        self._warned = False
        self._round: OpenRound | None = None

    @classmethod
    def from_config(cls, run_config: Mapping[str, Any], *, initial_parameters: Parameters, **more: Any) -> Self:
        """From the flat keys of a Flower run config, as ``PPSGD.from_config``."""
        settings = Settings.from_run_config(run_config)
        if settings.replies != "gradient":
            raise ValueError(f"replies={settings.replies!r} is for the Message API: this one takes gradients")
        return cls(initial_parameters=initial_parameters, **{**settings.arguments(), **more})

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._curator.ledger

    @property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for; None where there is no limit."""
        return self._curator.affordable_rounds

    def remaining_rounds(self, total: int) -> int:
        """How many of ``total`` rounds are left to run: not yet done, and within the budget."""
        return max(0, self._curator.plan(total) - self._first)

    def server_config(self, total: int) -> ServerConfig:
        """What Flower's legacy loop is to run of ``total`` rounds, each with the timeout."""
        return ServerConfig(num_rounds=self.remaining_rounds(total), round_timeout=self.round_timeout)

    def close(self) -> None:
        """Give up the lock on ``checkpoint_dir``."""
        self._curator.close()

    def privacy_statement(self) -> str:
        """The guarantee in words."""
        return statement.in_words(self._curator)

    def averaged(self, parameters: Parameters) -> Parameters:
        """The average iterate, where ``average`` is on; ``parameters`` otherwise."""
        return self._parameters(self._curator.averaged(self._flatten(parameters.tensors)))

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:  # noqa: ARG002
        return self._initial

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Budget, then the cohort from the enrolled population, then w and an Order to each of its members online."""
        round_ = self._first + server_round  # the legacy loop counts from 1, also after a restart
        self._curator.check_budget(round_)
        online = self._online(client_manager)
        drawn = self._enrolment.nodes(self._curator.draw(round_))
        asked = [str(online[node]) for node in drawn if node in online]
        self._round = OpenRound(self._curator, round_, self._flatten(parameters.tensors), asked)
        clients, instructions = _clients(client_manager), FitIns(parameters, self._order(round_))
        return _Asked((clients[cid], instructions) for cid in asked if cid in clients)

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters, dict[str, Scalar]]:
        """One noisy step; each result is a vector or zero."""
        opened = self._round
        if opened is None:
            raise not_configured(server_round)
        for client, result in results:
            opened.take(client.cid, lambda result=result: self._vector(result))  # type: ignore[misc]
        for failure in failures:
            error = failure if isinstance(failure, BaseException) else failure[1].status.message
            opened.pass_over(UnusableError("client error", str(error)))
        w, _ = opened.close(self._first + server_round)
        parameters = self._parameters(w)
        self._curator.save({str(place): data for place, data in enumerate(parameters.tensors)})
        released: dict[str, Scalar] = {"epsilon": self._curator.epsilon_so_far()}
        self._scalars.add(self._first + server_round, released)
        return parameters, released

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        if not self.evaluate_every or server_round % self.evaluate_every:
            return []
        self._curator.note_evaluation()
        online, clients = self._online(client_manager), _clients(client_manager)
        instructions = EvaluateIns(self.averaged(parameters), self._order(self._first + server_round))
        asked = [str(online[node]) for node in self._enrolment.known if node in online]
        return [(clients[cid], instructions) for cid in asked if cid in clients]

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],  # noqa: ARG002
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Means over users, weighted by their number of examples. Outside the guarantee."""
        measures = (
            {"loss": float(r.loss), NUM_EXAMPLES: float(r.num_examples), **_numbers(r.metrics)} for _, r in results
        )
        means: dict[str, Any] = dict(mean_of(measures) or {})
        return means.pop("loss", None), means

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        """No central evaluation."""

    def _online(self, client_manager: ClientManager) -> dict[Identity, Identity]:
        online = self._enrolment.refresh(lambda: _present(client_manager))
        self._curator.caveat = self._enrolment.caveat
        return online

    def _order(self, round_: int) -> dict[str, Scalar]:
        return order_for(self._curator, round_).to_flat()

    def _vector(self, result: FitRes) -> Vector:
        if not self._curator.steps.publishes:
            return np.zeros(0)
        if (result.num_examples != 1 or result.metrics) and not self._warned:
            self._warned = True
            log.warning(
                "A client reports its number of examples or metrics, as stock clients do and PPSGDClient does not: its "
                "parameters are taken for a gradient. Use PPSGDClient, or the Message API's PPSGD(replies='parameters')"
            )
        try:
            return self._flatten(result.parameters.tensors)
        except ValueError as error:
            raise UnusableError("of wrong keys, shape or dtype", str(error)) from None

    def _flatten(self, tensors: Sequence[bytes]) -> Vector:
        return self._layout.flatten(record_of(tensors))

    def _parameters(self, w: Vector) -> Parameters:
        return Parameters([array.data for array in self._layout.unflatten(w).values()], NUMPY)


class PPSGDClient(NumPyClient):
    """A NumPyClient that keeps θ in ``context.state`` and sends a clipped gradient of w.

    local_step, local_steps: as of ``client_app``, for stock strategies.
    """

    def __init__(
        self, learner: Learner, context: Context, *, local_step: float | None = None, local_steps: int | None = None
    ) -> None:
        self._learner = learner
        self._context = context
        self._local_step = local_step
        self._local_steps = local_steps

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """One visit. What goes back is the clipped gradient; 1 stands for the number of examples, which stays here."""
        order = Order.from_flat(config) if "publishes" in config else None
        arrays = {name: array.data for name, array in ArrayRecord(parameters).items()}
        return all_or_nothing(
            self._context,
            lambda: self._fit_locally(parameters, config) if order is None else self._visit(parameters, order),
            lambda reply: _leaving(reply[0], order, arrays),
        )

    def _visit(self, parameters: NDArrays, order: Order) -> tuple[NDArrays, int, dict[str, Scalar]]:
        w, personal = _flat(parameters), step_from(self._context, order, self._learner.initial_theta)
        sent, theta = visit(self._learner, w, personal.theta, replace(order, visit=personal.visit + 1))
        reply = _like(sent, parameters) if order.publishes else []
        after = personal.stepped(theta, order.round, order.average)
        keep(self._context, after, before=personal if order.starts else None)
        return reply, 1, {}

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[float, int, dict[str, Scalar]]:
        order = Order.from_flat(config) if "publishes" in config else None
        theta = theta_to_evaluate(self._context, self._learner, order)
        measures: dict[str, Scalar] = {**self._learner.evaluate(_flat(parameters), theta)}
        mirror(self._context, lambda: Leaving({METRICS: 8 * len(measures) + 8}, order=order), stepped=False)
        return float(measures.get("loss", 0.0)), self._learner.num_examples, measures

    def _fit_locally(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        trained, after = local_training(
            self._learner,
            _flat(parameters),
            personal_of(self._context, self._learner),
            local=LocalSteps.of(self._context, self._local_step, self._local_steps),
            proximal=float(config.get("proximal_mu", 0.0)),
        )
        keep(self._context, after)
        return _like(trained, parameters), self._learner.num_examples, {}


def _leaving(arrays: NDArrays, order: Order | None, w: Mapping[str, bytes]) -> Leaving:
    sizes = {GRADIENT if order else ARRAYS: sum(array.nbytes for array in arrays)} if arrays else {}
    return Leaving(sizes, norm_of(arrays) if order and arrays else None, order, w)


def _clients(client_manager: ClientManager) -> dict[str, ClientProxy]:
    client_manager.num_available()  # looks again who is there
    return client_manager.all()


def _present(client_manager: ClientManager) -> list[Present]:
    """Who is online, by client id; with names and keys where Flower's proxies know of a grid."""
    clients = _clients(client_manager)
    grid = next((client.grid for client in clients.values() if hasattr(client, "grid")), None)
    if grid is None:
        return [Present(cid) for cid in clients]
    return [node._replace(address=str(node.address)) for node in present_in(grid) if str(node.address) in clients]


def _flat(arrays: NDArrays) -> Vector:
    return np.concatenate([array.reshape(-1).astype(np.float64) for array in arrays])


def _like(vector: Vector, arrays: NDArrays) -> NDArrays:
    ends = np.cumsum([array.size for array in arrays])
    parts = np.split(vector, ends[:-1])
    return [part.reshape(array.shape).astype(array.dtype) for part, array in zip(parts, arrays, strict=True)]


def _numbers(metrics: dict[str, Scalar]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
