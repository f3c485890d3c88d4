"""PPSGD for Flower's legacy API: the same rounds behind ``flwr.server.strategy.Strategy``."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar

from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    NDArrays,
    Parameters,
    Scalar,
    parameters_to_ndarrays,
)
from flwr.server import ServerConfig
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from flwr_ppsgd.algorithm import PrivateMetrics, Release, Steps, Vector
from flwr_ppsgd.arrays import NUMPY, record_from, record_of
from flwr_ppsgd.callers import refuse_dp_strategy, refuse_secagg_workflow
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.recipe import Recipe, Task
from flwr_ppsgd.recipe import recipe as make_recipe
from flwr_ppsgd.server.enrolment import Present, present_in
from flwr_ppsgd.server.rounds import OpenRound, Reply, Rounds, mean_of, refuse_other_model
from flwr_ppsgd.server.training import Identity, ReplyKind, Training
from flwr_ppsgd.settings import RUN_CONFIG, Settings, named_in_keys
from flwr_ppsgd.wire import ANSWER, ARRAYS, NUM_EXAMPLES, SERVER_ROUND, Layout

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
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Central: TypeAlias = Callable[
    [int, NDArrays, dict[str, Scalar]], tuple[float, dict[str, Scalar]] | None
]


class _Asked(list[Any]):
    """A list that is always true.

    Flower's legacy loop skips a round whose list is empty, but this round still releases.
    """

    def __bool__(self) -> bool:
        return True


def _without_cohort_sizes(record: logging.LogRecord) -> bool:
    """Whether a record of Flower's may be logged."""
    return not str(record.msg).startswith(COHORT_SIZES)


def _noted(
    method: Callable[Concatenate["PPSGDStrategy", Arguments], Returned],
) -> Callable[Concatenate["PPSGDStrategy", Arguments], Returned]:
    """The method, noting for the operator what ends a run in it."""

    @functools.wraps(method)
    def noting(
        self: "PPSGDStrategy", /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Returned:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._rounds.private.note_error(error)
            raise

    return noting


class PPSGDStrategy(Strategy):
    """PPSGD for ``ServerApp(server_fn=…)``.

    The legacy loop always counts from 1 and cannot end early. Give it
    ``strategy.server_config(total)``: what is left of the total after the rounds found in
    ``checkpoint_dir``, and within the budget, each round with its timeout. Without that, an
    exhausted budget ends the run with Flower's ``PrivacyBudgetExhausted``, and no statement is
    logged at the end.

    Args:
        initial_parameters: w before the first round; required, so that no client is asked for it.
        evaluate_fn: central evaluation, as of Flower's legacy strategies: called with the absolute
            round, w as a list of arrays and an empty config, before the first round and after each.

    The other arguments are those of ``PPSGD``, explained in ``flwr_ppsgd.server.training``.
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
        enrolled: Iterable[Identity] | None = None,
        min_online: float = 0.5,
        wait_timeout: float = 600.0,
        round_timeout: float = 3600.0,
        replies: ReplyKind = "gradient",
        average: bool = False,
        checkpoint_dir: Path | str | None = None,
        checkpoint_every: int = 1,
        budget_dir: Path | str | None = None,
        metrics: PrivateMetrics | None = None,
        insecure_seed: int | None = None,
        recipe: Recipe | None = None,
        evaluate_fn: Central | None = None,
    ) -> None:
        if not isinstance(initial_parameters, Parameters):
            raise ValueError(
                "initial_parameters must be flwr.common.Parameters, got "
                f"{type(initial_parameters).__name__}: pass ndarrays_to_parameters([...]) with the "
                "initial w"
            )
        if release.aggregation is not None:
            raise ValueError(
                f"aggregation={release.aggregation} takes four exchanges per round, and Flower's "
                "legacy loop has one: use flwr_ppsgd.PPSGD, or leave out aggregation"
            )
        self.training = Training.of(
            release=release,
            steps=steps,
            delta=delta,
            max_epsilon=max_epsilon,
            evaluate_every=evaluate_every,
            enrolled=enrolled,
            min_online=min_online,
            wait_timeout=wait_timeout,
            round_timeout=round_timeout,
            replies=replies,
            average=average,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            budget_dir=budget_dir,
            metrics=metrics,
            insecure_seed=insecure_seed,
            recipe=recipe,
        )
        flower_log.addFilter(_without_cohort_sizes)  # while this process lives
        self._rounds = Rounds(self.training)
        self._curator = self._rounds.curator
        self._layout = Layout.of(record_of(initial_parameters.tensors), self._rounds.hold())
        # what comes before the first round takes rounds of Flower's loop
        self._first = self._curator.rounds_done - len(self._curator.pending)
        self._initial = initial_parameters
        if self._curator.resumed is not None:
            arrays = self._curator.resumed.arrays
            self._initial = Parameters(list(arrays.values()), NUMPY)
            so_far = Layout.of(record_of(self._initial.tensors), self._rounds.hold())
            refuse_other_model(so_far, self._layout)
        self._flatten(self._initial.tensors)  # what was resumed must be readable
        self._parameters_sent = self._initial
        self._evaluate_fn = evaluate_fn
        self._warned = False

    @classmethod
    def from_config(
        cls, run_config: Mapping[str, Any], *, initial_parameters: Parameters, **more: Any
    ) -> Self:
        """From the flat keys of a Flower run config, as ``PPSGD.from_config``."""
        settings = Settings.from_run_config(run_config)
        given = {**settings.arguments(), **more}
        with named_in_keys(RUN_CONFIG):
            return cls(initial_parameters=initial_parameters, **given)

    @classmethod
    def auto(
        cls,
        *,
        initial_parameters: Parameters,
        population: int,
        epsilon: float,
        delta: float,
        task: Task = "classification",
        sparse: Sequence[int] = (),
        rounds: int | None = None,
        rate: float | None = None,
        body: bool = False,
        **more: Any,
    ) -> Self:
        """With nothing to tune, as ``PPSGD.auto``; ``server_config()`` has the planned rounds."""
        made = make_recipe(
            population=population,
            epsilon=epsilon,
            delta=delta,
            task=task,
            sparse=sparse,
            rounds=rounds,
            rate=rate,
            body=body,
        )
        return cls(initial_parameters=initial_parameters, **{**made.arguments(), **more})

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._curator.ledger

    @property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for; None if there is no limit."""
        return self._curator.affordable_rounds

    def remaining_rounds(self, total: int) -> int:
        """How many of ``total`` rounds are left to run: not yet done, and within the budget."""
        planned = self._rounds.plan(total)
        self._rounds.say_whether_it_can_learn(self._layout.size)
        if planned > self._curator.rounds_done:
            return planned - self._first
        return 0 if self.training.recipe is None else 1  # in which w is delivered once more

    def server_config(self, total: int | None = None) -> ServerConfig:
        """What Flower's legacy loop is to run of ``total`` rounds, each with the timeout.

        Args:
            total: the number of rounds; unless given, the number that ``auto`` has planned.
        """
        if total is None and self.training.recipe is None:
            raise ValueError("server_config needs the number of rounds: only auto plans one")
        return ServerConfig(
            num_rounds=self.remaining_rounds(self.training.rounds_or(total, 0)),
            round_timeout=self.training.round_timeout,
        )

    def close(self) -> None:
        """Give up the lock on ``checkpoint_dir``."""
        self._curator.close()

    def privacy_statement(self) -> str:
        """The guarantee in words."""
        return self._curator.promise().statement()

    def privacy_data(self) -> dict[str, object]:
        """The guarantee as data, ready for JSON."""
        return self._curator.promise(self._layout.size).as_data()

    def averaged(self, parameters: Parameters) -> Parameters:
        """The average iterate, if ``average`` is on; ``parameters`` otherwise."""
        if not self._curator.averages:
            return parameters
        average = self._curator.averaged(self._flatten(parameters.tensors))
        return self._parameters(average, parameters)

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:  # noqa: ARG002
        refuse_dp_strategy("PPSGDStrategy")
        return self._initial

    @_noted
    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Budget, cohort from the enrolled population, then w and an Order to those online."""
        refuse_dp_strategy("PPSGDStrategy")
        refuse_secagg_workflow("PPSGDStrategy")
        round_ = self._absolute(server_round)
        self._parameters_sent = parameters
        if self.training.recipe is not None and round_ > self._rounds.last_round:
            return []
        if self._curator.pending:
            name = self._curator.pending[0]
            asked = self._rounds.open_before(name, lambda: _present(client_manager))
            record = record_of(parameters.tensors)
            order = self._rounds.before_order(name, record)
            instructions = FitIns(parameters, {**order, SERVER_ROUND: 0})
        else:
            w = self._flatten(parameters.tensors)
            asked = self._rounds.open(round_, w, self._layout, lambda: _present(client_manager))
            instructions = FitIns(parameters, self._config(round_, parameters))
        clients = _clients(client_manager)
        return _Asked((clients[str(cid)], instructions) for cid in asked if str(cid) in clients)

    @_noted
    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters, dict[str, Scalar]]:
        """One noisy step; each result is a vector or zero."""
        round_ = self._absolute(server_round)
        opened = self._rounds.opened(round_)
        before = self._curator.pending[:1]
        read = _answer if before else self._reply
        for client, result in results:
            opened.take(client.cid, lambda result=result: read(result))  # type: ignore[misc]
        for failure in failures:
            _count_failure(opened, failure)
        if before:
            self._rounds.publish_before(before[0])
            return self._parameters_sent, {}
        heard = bool(results or failures)
        w, released = self._rounds.publish(round_, heard)
        parameters = self._parameters_sent
        if self.training.steps.publishes:
            parameters = self._parameters(w, parameters)
        self._curator.save({str(place): data for place, data in enumerate(parameters.tensors)})
        self._rounds.refuse_to_go_on()
        return parameters, {**released}

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask every enrolled node online, if evaluation is due."""
        round_ = self._absolute(server_round)
        if self._curator.pending:
            return []
        asked = self._rounds.evaluators(round_, lambda: _present(client_manager))
        clients = _clients(client_manager)
        average = self.averaged(parameters)
        config = self._config(round_, average)
        if self.training.recipe is not None and self.training.replies == "gradient":
            measured = bool(asked)
            record = record_of(average.tensors)
            if round_ >= self._rounds.last_round:
                asked = asked or self._rounds.everybody(lambda: _present(client_manager))
                config = self._rounds.last_order(record, measured=measured)
            else:
                config = self._rounds.measuring_order(round_, record)
            config = {**config, SERVER_ROUND: round_}
        instructions = EvaluateIns(average, config)
        chosen = [(clients[str(cid)], instructions) for cid in asked if str(cid) in clients]
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
        self._rounds.note_failed_evaluations(round_, list(map(_failure, failures)), len(results))
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
        arrays = parameters_to_ndarrays(self.averaged(parameters))
        return self._evaluate_fn(self._absolute(server_round), arrays, {})

    def _absolute(self, server_round: int) -> int:
        """The round over the whole training: the legacy loop counts from 1 after a restart."""
        return max(0, self._first + server_round)

    def _end(self, round_: int) -> None:
        """Log the statement after the last planned round, and give up the lock."""
        if round_ >= self._rounds.last_round:
            log.info("%s", self.privacy_statement())
            self.close()

    def _config(self, round_: int, parameters: Parameters) -> dict[str, Scalar]:
        """What a client gets beside w: the round, and an Order if it knows of Orders."""
        if self.training.replies == "parameters":
            return {SERVER_ROUND: round_}
        return {**self._rounds.order(round_, record_of(parameters.tensors)), SERVER_ROUND: round_}

    def _reply(self, result: FitRes) -> Reply:
        if self.training.replies == "gradient":
            self._warn_of_stock_clients(result)
        tensors = result.parameters.tensors
        arrays = record_of(tensors) if tensors else None
        return Reply(arrays=arrays, measures=result.metrics, found=[ARRAYS] if arrays else [])

    def _warn_of_stock_clients(self, result: FitRes) -> None:
        """Tell the operator once that a client looks like one that returns parameters."""
        known = set(self.training.metrics.bounds) if self.training.metrics else set()
        stock = result.num_examples != 1 or set(result.metrics) - known
        if stock and not self._warned:
            self._warned = True
            self._rounds.private.note_problem(
                "A client reports its number of examples or metrics, as stock clients do and "
                "PPSGDClient does not: its parameters are taken for a gradient. Use PPSGDClient, "
                "or PPSGDStrategy(replies='parameters')"
            )

    def _flatten(self, tensors: Sequence[bytes]) -> Vector:
        return self._layout.flatten(record_of(tensors))

    def _parameters(self, w: Vector, like: Parameters) -> Parameters:
        record = self._layout.unflatten(w, like=record_of(like.tensors))
        return Parameters([array.data for array in record.values()], NUMPY)


def _answer(result: FitRes) -> Reply:
    """An answer before the first round: one array, which the legacy API does not name."""
    tensors = result.parameters.tensors
    return Reply(arrays=record_from({ANSWER: tensors[0]}) if len(tensors) == 1 else None)


def _failure(failure: tuple[ClientProxy, FitRes | EvaluateRes] | BaseException) -> str:
    """What a client that failed has said."""
    if isinstance(failure, BaseException):
        return str(failure)
    return failure[1].status.message or "a status that is not OK"


def _count_failure(opened: OpenRound, failure: tuple[ClientProxy, FitRes] | BaseException) -> None:
    """Count a failure as zero; Flower does not say whose an exception is."""
    if isinstance(failure, BaseException):
        opened.fail(_failure(failure))
        return
    client, _ = failure
    opened.take(client.cid, lambda: Reply(error=_failure(failure)))


def _clients(client_manager: ClientManager) -> dict[str, ClientProxy]:
    client_manager.num_available()  # looks again who is there
    return client_manager.all()


def _present(client_manager: ClientManager) -> list[Present]:
    """Who is online, by client id; with names and keys if Flower's proxies know of a grid."""
    clients = _clients(client_manager)
    grid = next((client.grid for client in clients.values() if hasattr(client, "grid")), None)
    if grid is None:
        return [Present(cid) for cid in clients]
    nodes = [node._replace(address=str(node.address)) for node in present_in(grid)]
    return [node for node in nodes if node.address in clients]
