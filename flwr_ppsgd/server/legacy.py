"""PPSGD for Flower's legacy API: the same curator behind ``flwr.server.strategy.Strategy``."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from flwr.app import ArrayRecord, MessageType
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    NDArrays,
    Parameters,
    Scalar,
)
from flwr.server import ServerConfig
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from flwr_ppsgd.algorithm import PrivateMetrics, Release, Steps, Vector
from flwr_ppsgd.arrays import NUMPY, record_from, record_of
from flwr_ppsgd.flower_wrappers import refuse_dp_strategy, refuse_secagg_workflow
from flwr_ppsgd.recipe import Recipe
from flwr_ppsgd.server.enrolment import OnlineNode
from flwr_ppsgd.server.replies import mean_of
from flwr_ppsgd.server.rounds import SumRequest, UnusableError
from flwr_ppsgd.server.strategy import CuratedStrategy, check_initial
from flwr_ppsgd.training import Enrolled, Identity, ReplyKind, Training
from flwr_ppsgd.wire import (
    ANSWER,
    ARRAYS,
    GRADIENT,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
    Order,
)

log = logging.getLogger("flwr.ppsgd")
flower_log = logging.getLogger("flwr")

# Lines of Flower's own legacy loop that tell how many take part in a round: server-private.
COHORT_SIZES = (
    "configure_fit: strategy sampled",
    "configure_fit: no clients selected",
    "aggregate_fit: received",
    "configure_evaluate: strategy sampled",
    "aggregate_evaluate: received",
)
Instructions = TypeVar("Instructions", FitIns, EvaluateIns)
Central: TypeAlias = Callable[
    [int, NDArrays, dict[str, Scalar]], tuple[float, dict[str, Scalar]] | None
]


class _NeverFalse(list[Any]):
    """A list that is always true.

    Flower's legacy loop skips a round whose list is empty, but this round still releases.
    """

    def __bool__(self) -> bool:
        return True


def _shows_no_cohort_size(record: logging.LogRecord) -> bool:
    """Whether a record of Flower's may be logged."""
    return not str(record.msg).startswith(COHORT_SIZES)


class PPSGDStrategy(CuratedStrategy, Strategy):
    """PPSGD for ``ServerApp(server_fn=…)``.

    The legacy loop always counts from 1 and cannot end early. Give it
    ``strategy.server_config(total)``: what is left of the total after the rounds found in
    ``checkpoint_dir``, and within the budget, each round with its timeout. Without that, an
    exhausted budget ends the run with Flower's ``PrivacyBudgetExhausted``, and no statement is
    logged at the end.

    Args:
        initial_parameters: w before the first round; required, so that no client is asked for it.
        evaluate_fn: central evaluation, as in Flower's legacy strategies: called with the absolute
            round, w as a list of arrays and an empty config, before the first round and after each.

    The other arguments are those of ``PPSGD``, explained in ``flwr_ppsgd.training``.
    """

    def __init__(
        self,
        *,
        release: Release | Recipe,
        steps: Steps,
        delta: float,
        initial_parameters: Parameters,
        max_epsilon: float | None = None,
        evaluate_every: int = 0,
        enrolled: Enrolled | Iterable[Identity] | None = None,
        replies: ReplyKind = "gradient",
        average: bool = False,
        metrics: PrivateMetrics | None = None,
        checkpoint_dir: Path | str | None = None,
        checkpoint_every: int = 1,
        budget_dir: Path | str | None = None,
        round_timeout: float = 3600.0,
        insecure_seed: int | None = None,
        evaluate_fn: Central | None = None,
    ) -> None:
        if not isinstance(initial_parameters, Parameters):
            raise ValueError(
                "initial_parameters must be flwr.common.Parameters, got "
                f"{type(initial_parameters).__name__}: pass ndarrays_to_parameters([...]) with the "
                "initial w"
            )
        training = Training.of(
            release=release,
            steps=steps,
            delta=delta,
            max_epsilon=max_epsilon,
            evaluate_every=evaluate_every,
            enrolled=enrolled,
            replies=replies,
            average=average,
            metrics=metrics,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            budget_dir=budget_dir,
            round_timeout=round_timeout,
            insecure_seed=insecure_seed,
        )
        if training.release.aggregation is not None:
            raise ValueError(
                f"aggregation={training.release.aggregation} takes four exchanges per round, and "
                "Flower's legacy loop has one: use flwr_ppsgd.PPSGD, or leave out aggregation"
            )
        initial = record_of(initial_parameters.tensors)
        check_initial("initial_parameters", initial, replies)
        flower_log.addFilter(_shows_no_cohort_size)  # while this process lives
        super().__init__(training)
        self._note_sent(self._latest_arrays(initial))
        # what comes before the first round takes rounds of Flower's loop
        self._first = self.rounds_done - len(self._account.pending_releases)
        self._evaluate_fn = evaluate_fn
        self._warned = False

    def remaining_rounds(self, total: int | None = None) -> int:
        """How many of ``total`` rounds are left to run: not yet done, and within the budget.

        Args:
            total: the number of rounds; unless given, the number that ``auto`` has planned.
        """
        if total is None and self.training.recipe is None:
            raise ValueError("server_config needs the number of rounds: only auto plans one")
        planned = self._account.plan(total, 0)
        self._curator.say_whether_it_can_learn(self._layout.size)
        if planned > self.rounds_done:
            return planned - self._first
        delivers = self.training.recipe is not None  # once more, in a round without training
        return 1 if delivers else 0

    def server_config(self, total: int | None = None) -> ServerConfig:
        """What Flower's legacy loop is to run of ``total`` rounds, each with the timeout.

        Args:
            total: see ``remaining_rounds``.
        """
        return ServerConfig(
            num_rounds=self.remaining_rounds(total),
            round_timeout=self.training.round_timeout,
        )

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:  # noqa: ARG002
        refuse_dp_strategy("PPSGDStrategy")
        return _parameters(self._arrays)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Budget, cohort from the enrolled population, then w and an Order to those online."""
        refuse_dp_strategy("PPSGDStrategy")
        refuse_secagg_workflow("PPSGDStrategy")
        round_ = self._absolute(server_round)
        self._note_sent(record_of(parameters.tensors))
        if self.training.recipe is not None and round_ > self._account.last_round:
            return []
        pending = self._account.pending_releases
        if pending:
            request = self._curator.request_before(next(iter(pending)))
        else:
            request = self._curator.request(round_, len(self._w))
        nbytes = sum(map(len, parameters.tensors))
        with self._account.facts.noting_errors():
            opened = self._curator.open_sum(request, lambda: _nodes_online(client_manager), nbytes)
        (payloads,) = opened.exchanges()
        config: dict[str, Scalar] = {SERVER_ROUND: request.round}
        if self.training.replies == "gradient":
            order = self._curator.order(request)
            config = self._signed_config(order, self._arrays, MessageType.TRAIN, client_manager)
        return _NeverFalse(_for_each(payloads, FitIns(parameters, config), client_manager))

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters, dict[str, Scalar]]:
        """One noisy step; each result is a vector or zero."""
        round_ = 0 if self._account.pending_releases else self._absolute(server_round)
        opened = self._curator.open_sum_of(round_)
        for client, result in results:
            opened.take(client.cid, partial(self._read_result, result, opened.request))
        for failure in failures:
            if isinstance(failure, BaseException):  # Flower does not say whose it is
                opened.take_unnamed_failure(str(failure))
            else:
                client, result = failure
                opened.take(client.cid, partial(self._read_result, result, opened.request))
        with self._account.facts.noting_errors():
            arrays, released = self._publish(opened, heard=bool(results or failures))
            self._curator.refuse_to_go_on()
        return _parameters(arrays), {**released}

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask every enrolled node online, if evaluation is due; the last w goes to everybody."""
        round_ = self._absolute(server_round)
        if self._account.pending_releases:
            return []
        asked = self._curator.evaluators(round_, lambda: _nodes_online(client_manager))
        measured = bool(asked)
        last = self.training.recipe is not None and round_ >= self._account.last_round
        if last and not asked:
            asked = self._curator.everybody(lambda: _nodes_online(client_manager))
        arrays = self.averaged(record_of(parameters.tensors))
        config: dict[str, Scalar] = {SERVER_ROUND: round_}
        if self.training.replies == "gradient":
            order = self._curator.evaluation_order(round_, last=last, measured=measured)
            config = self._signed_config(order, arrays, MessageType.EVALUATE, client_manager)
        instructions = EvaluateIns(_parameters(arrays), config)
        chosen = _for_each(asked, instructions, client_manager)
        if not chosen:
            self._end(round_)
        return chosen

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Means over users, weighted by their number of examples. Outside the guarantee."""
        round_ = self._absolute(server_round)
        said = [
            str(failure) if isinstance(failure, BaseException) else _message_of(failure[1])
            for failure in failures
        ]
        self._account.facts.note_failed_evaluations(round_, said, len(results))
        measures = [
            {**result.metrics, "loss": result.loss, NUM_EXAMPLES: result.num_examples}
            for _, result in results
        ]
        means: dict[str, Any] = {**mean_of(measures)}
        self._end(round_)
        return means.pop("loss", None), means

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Central evaluation, if there is an ``evaluate_fn``."""
        if self._evaluate_fn is None:
            return None
        arrays = self.averaged(record_of(parameters.tensors))
        w = [array.numpy() for array in arrays.values()]
        return self._evaluate_fn(self._absolute(server_round), w, {})

    def _absolute(self, server_round: int) -> int:
        """The round over the whole training: the legacy loop counts from 1 after a restart."""
        return max(0, self._first + server_round)

    def _end(self, round_: int) -> None:
        """Log the statement after the last planned round, and give up the lock."""
        if round_ >= self._account.last_round:
            log.info("%s", self.privacy_data()["short"])
            self.close()

    # --- translation

    def _signed_config(
        self, order: Order, arrays: ArrayRecord, kind: str, client_manager: ClientManager
    ) -> dict[str, Scalar]:
        """What a client gets beside w: the Order, and the round as Flower's clients read it."""
        grid = _grid_of(client_manager)
        run = 0 if grid is None else grid.run.run_id
        return {**self._signed_order(order, arrays, kind, run), SERVER_ROUND: order.round}

    def _read_result(self, result: FitRes, request: SumRequest) -> Vector:
        """What one client sent, whose arrays have no names; an exception if it is no use."""
        if result.status.code is not Code.OK:
            raise UnusableError("client error", _message_of(result))
        tensors = result.parameters.tensors
        if not tensors:
            return self._vector_in({}, request)
        if not request.round:
            answer = record_from({ANSWER: tensors[0]}) if len(tensors) == 1 else record_of(tensors)
            return self._vector_in({GRADIENT: answer}, request)
        if self.training.replies == "parameters":
            return self._vector_in({ARRAYS: record_of(tensors)}, request)
        self._warn_of_stock_clients(result)
        return self._vector_in({GRADIENT: record_of(tensors), METRICS: result.metrics}, request)

    def _warn_of_stock_clients(self, result: FitRes) -> None:
        """Tell the operator once that a client looks like one that returns parameters."""
        known = set(self.training.metrics.bounds) if self.training.metrics else set()
        stock = result.num_examples != 1 or set(result.metrics) - known
        if stock and not self._warned:
            self._warned = True
            self._account.facts.note_problem(
                "A client reports its number of examples or metrics, as stock clients do and "
                "PPSGDClient does not: its parameters are taken for a gradient. Use PPSGDClient, "
                "or PPSGDStrategy(replies='parameters')"
            )


def _parameters(arrays: ArrayRecord) -> Parameters:
    return Parameters([array.data for array in arrays.values()], NUMPY)


def _message_of(failed: FitRes | EvaluateRes) -> str:
    """What a client that failed has said."""
    return failed.status.message or "a status that is not OK"


def _for_each(
    asked: Iterable[Identity], instructions: Instructions, client_manager: ClientManager
) -> list[tuple[ClientProxy, Instructions]]:
    """The same instructions for each asked client that is still there."""
    clients = _clients(client_manager)
    return [(clients[str(cid)], instructions) for cid in asked if str(cid) in clients]


def _clients(client_manager: ClientManager) -> dict[str, ClientProxy]:
    client_manager.num_available()  # looks again who is there
    return client_manager.all()


def _grid_of(client_manager: ClientManager) -> Any:
    """The grid that Flower's proxies know; None if they know of none."""
    clients = client_manager.all().values()
    return next((client.grid for client in clients if hasattr(client, "grid")), None)


def _nodes_online(client_manager: ClientManager) -> list[OnlineNode]:
    """Who is online, by client id; with names and keys if Flower's proxies know of a grid."""
    clients = _clients(client_manager)
    grid = _grid_of(client_manager)
    if grid is None:
        return [OnlineNode(cid) for cid in clients]
    nodes = [OnlineNode.of(node) for node in grid.get_nodes()]
    named = [node._replace(address=str(node.address)) for node in nodes]
    return [node for node in named if node.address in clients]
