"""PPSGD as a Flower strategy (Message API): translate, ask the curator, translate back."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from flwr_ppsgd.algorithm import PrivateMetrics, Release, SecureSum, Steps, Vector
from flwr_ppsgd.arrays import Layout, bytes_of, is_buffer, record_from
from flwr_ppsgd.flower_wrappers import refuse_dp_strategy
from flwr_ppsgd.ledger import Ledger
from flwr_ppsgd.recipe import Recipe, Task
from flwr_ppsgd.recipe import recipe as make_recipe
from flwr_ppsgd.secure.coordinator import SecureStage
from flwr_ppsgd.server.accountant import LedgerAccountant
from flwr_ppsgd.server.curator import Curator
from flwr_ppsgd.server.enrolment import present_in
from flwr_ppsgd.server.replies import (
    answer_layout,
    answered_node,
    content_in_both_forms,
    finite_measures,
    mean_of,
    measures_in,
    secure_message_in,
    vector_in,
    with_named_arrays,
)
from flwr_ppsgd.server.rounds import (
    ENOUGH_ASKED,
    PLAIN_STAGE,
    OpenSum,
    Payloads,
    Sent,
    SumRequest,
    UnusableError,
)
from flwr_ppsgd.server.superlink import ask, last_line, refusals_of
from flwr_ppsgd.settings import Settings
from flwr_ppsgd.signature import digest, signed_order
from flwr_ppsgd.statement import rounded_up
from flwr_ppsgd.training import Enrolled, Identity, ReplyKind, Training
from flwr_ppsgd.wire import (
    ARRAYS,
    CONFIG,
    DATA,
    GRADIENT,
    METRICS,
    ORDER,
    SECURE,
    SIZE,
    UNIT,
    VARIANCE,
    Order,
    payload_hash,
)

log = logging.getLogger("flwr.ppsgd")

FLOWER_ROUNDS = 3  # of a Flower strategy, if nobody says how many


class CuratedStrategy:
    """What the strategies of both APIs have in common: w, its sums, and what they promise.

    Args:
        training: all settings.
    """

    def __init__(self, training: Training) -> None:
        self._curator = Curator(training)
        self._account = self._curator.account
        self._arrays = ArrayRecord()  # w as it was sent last
        self._layout = Layout((), (), ())  # its names and shapes
        self._w: Vector = np.zeros(0)  # the same as one vector

    @classmethod
    def from_config(cls, run_config: Mapping[str, Any], **more: Any) -> Self:
        """From the flat keys of a Flower run config.

        Args:
            run_config: flat keys: see ``flwr_ppsgd.settings.Settings``.
            more: arguments of the strategy, which come before the run config's.
        """
        settings = Settings.from_run_config(run_config)
        return cls(**{**settings.arguments(), **more})

    @classmethod
    def auto(
        cls,
        *,
        population: int,
        epsilon: float,
        delta: float,
        task: Task = "classification",
        sparse: Sequence[int] = (),
        rounds: int | None = None,
        rate: float | None = None,
        body: bool = False,
        aggregation: SecureSum | None = None,
        **more: Any,
    ) -> Self:
        """With nothing to tune: the recipe of ``flwr_ppsgd.recipe`` for a population and a budget.

        Users send what they would add to w, in a handful of rounds; after the last one w goes to
        everybody, and each device makes its personal model.

        Args:
            population: N, the number of enrolled users.
            epsilon: ε of everything that is released, under zero-out neighbours.
            delta: δ, well below 1/population.
            task: "classification" or "regression".
            sparse: the places of columns of w that most users lack, such as words or items.
            rounds: the number of rounds; 2 to 8 by N and ε unless given.
            rate: the share of users per round, for very many of them (1,000/N is enough); None is
                everyone.
            body: whether w holds the body of a network that is trained: at least 4 rounds.
            aggregation: ``SecureSum`` if clients add the noise and the server sees sums only.
            more: arguments of the strategy, which come before the recipe's.
        """
        made = make_recipe(
            population=population,
            epsilon=epsilon,
            delta=delta,
            task=task,
            sparse=sparse,
            rounds=rounds,
            rate=rate,
            body=body,
            aggregation=aggregation,
        )
        return cls(**{**made.arguments(), **more})

    @property
    def training(self) -> Training:
        """All settings."""
        return self._account.training

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._account.ledger

    @property
    def accountant(self) -> LedgerAccountant:
        """The ledger as Flower's ``PrivacyAccountant``."""
        training = self.training
        return LedgerAccountant(self.ledger, training.release, training.max_epsilon)

    @property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for; None if there is no limit."""
        return self._account.affordable_rounds()

    @property
    def rounds_done(self) -> int:
        """The last round that was published, restarts included."""
        return self._account.rounds_done

    def note_evaluation(self) -> None:
        """From now on every statement says that there was evaluation on client data."""
        self._account.note_evaluation()

    def privacy_statement(self) -> str:
        """The guarantee in words."""
        return str(self.privacy_data()["statement"])

    def privacy_data(self) -> dict[str, object]:
        """The guarantee as data, ready for JSON."""
        return self._account.promise(self._layout.size).as_data()

    def close(self) -> None:
        """Save the last w and give up ``checkpoint_dir``: another strategy can go on there."""
        self._account.close()

    # --- w, as Flower's arrays and as one vector

    def _note_sent(self, arrays: ArrayRecord) -> None:
        """Remember the w that goes out, by which replies are read."""
        self._arrays = arrays
        self._layout = layout_of(arrays, self.training.replies)
        self._w = self._layout.flatten(arrays)

    def _latest_arrays(self, initial: ArrayRecord) -> ArrayRecord:
        """The w to go on from: that of the last round, if there was one and it has this form."""
        found = self._account.checkpoint
        if found is None:
            return initial
        latest = record_from(found.arrays)
        replies = self.training.replies
        difference = layout_of(latest, replies).difference(layout_of(initial, replies))
        if difference:
            raise ValueError(
                f"the training so far and the initial parameters have {difference}: continue with "
                "the same model, or start anew in another checkpoint_dir"
            )
        return latest

    def averaged(self, arrays: ArrayRecord) -> ArrayRecord:
        """The mean over rounds that is published in place of w, if there is one."""
        if not self._curator.averages:
            return arrays
        layout = layout_of(arrays, self.training.replies)
        mean = self._curator.mean_of_rounds(layout.flatten(arrays))
        return layout.unflatten(mean, like=arrays)

    # --- one sum

    def _vector_in(self, content: Mapping[str, Any], request: SumRequest) -> Vector:
        """What one client sent; an exception if nothing of it can be used."""
        training = self.training
        if not training.steps.publishes:
            return np.zeros(0)  # at α = 0 a client has nothing to say
        if not request.round:
            return vector_in(content, GRADIENT, answer_layout(request.length))
        if training.replies == "parameters":
            named = with_named_arrays(content, self._arrays)
            return cast(Vector, self._w - vector_in(named, ARRAYS, self._layout))
        gradient = vector_in(content, GRADIENT, self._layout)
        return request.vector_of(gradient, finite_measures(content.get(METRICS)))

    def _publish(self, opened: OpenSum, heard: bool = True) -> tuple[ArrayRecord, dict[str, float]]:
        """The new w, saved, and what is released along with it; the arguments are the curator's."""
        w, released = self._curator.publish(opened, self._w, self._layout.columns, heard)
        arrays = self._arrays
        if w is not self._w:
            arrays = self._layout.unflatten(w, like=arrays)
        if opened.request.round:
            self._account.save(bytes_of(arrays))
        return arrays, released

    def _signed_order(
        self, order: Order, arrays: ArrayRecord | None, kind: str, run: int
    ) -> dict[str, Any]:
        """The Order as it is sent: signed for this type of message and run, over w."""
        w_digest = digest({} if arrays is None else bytes_of(arrays))
        return signed_order(order, w_digest, self._account.key, kind=kind, run=run)


def layout_of(arrays: ArrayRecord, replies: ReplyKind) -> Layout:
    """Names and shapes of w; of clients that return parameters, without their buffers."""
    return Layout.of(arrays, is_buffer if replies == "parameters" else None)


def check_initial(name: str, arrays: ArrayRecord, replies: ReplyKind) -> None:
    """ValueError unless w, the argument of this name, holds finite numbers."""
    if not np.isfinite(layout_of(arrays, replies).flatten(arrays)).all():
        raise ValueError(
            f"{name} hold NaN or infinity: nothing was sent or charged; pass a w of finite numbers"
        )


class PPSGD(CuratedStrategy, Strategy):
    """Personalized-Private-SGD: clip, sum, divide by a public number, add noise, step w.

    Args:
        release: what is published in a round; or a recipe, as ``auto`` makes it.
        steps: how far w and θ move.
        delta: δ at which the guarantee is stated.
        enrolled: the nodes that form the population; or ``flwr_ppsgd.training.Enrolled``, which
            also says for how many of them to wait.

    The other arguments are explained where they are defined: ``flwr_ppsgd.training.Training``.
    """

    def __init__(
        self,
        *,
        release: Release | Recipe,
        steps: Steps,
        delta: float,
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
    ) -> None:
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
        super().__init__(training)
        self._asked: list[Metadata] = []
        self._delivered: set[Identity] = set()  # nodes that have the last w of the recipe

    @property
    def release(self) -> Release:
        """What is published in a round."""
        return self.training.release

    @property
    def steps(self) -> Steps:
        """How far w and θ move."""
        return self.training.steps

    def published(self, arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
        """What everybody may have after training by ``auto``: w, its noise ν, the unit, the size.

        ``numpy.savez("model.npz", **strategy.published(result.arrays))`` keeps it;
        ``personalize`` makes the model of somebody who never took part from it.

        Args:
            arrays: w, such as ``result.arrays``.
        """
        values = self._account.values
        return {
            **{name: array.numpy() for name, array in arrays.items()},
            VARIANCE: self._curator.variance,
            UNIT: np.array(values.unit),
            SIZE: np.array(values.size),
        }

    def summary(self) -> None:
        """Log the settings that make up the promise."""
        refuse_dp_strategy("PPSGD")
        log.info("\t├──> %s", self.release)
        if self.training.recipe is None:
            log.info("\t├──> %s (alpha·Q = %g)", self.steps, self.steps.alpha_q)
        log.info("\t└──> %s", self._account.facts.where())

    # --- a whole training

    def start(  # noqa: PLR0917 - Flower's own signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
        on_round: Callable[[int, Result], None] | None = None,
    ) -> Result:
        """Train for ``num_rounds`` rounds, or as many as the budget pays for.

        Args:
            grid: the nodes.
            initial_arrays: w before the first round. One strategy is one training: a second call,
                or one that finds a training in ``checkpoint_dir``, goes on from where it was.
            num_rounds: the total, earlier calls and restarts included. Unless given, the number
                that ``auto`` has planned, or 3. Under ``auto``, fewer than it has planned have less
                noise each.
            timeout: of a round, in seconds; ``round_timeout`` unless given.
            train_config: sent to the clients in training.
            evaluate_config: sent to the clients in evaluation.
            evaluate_fn: called with the absolute round and w, before the first round and after
                each.
            should_stop: called with the round and the result so far after each round; if it is
                true, the training ends there. Flower's strategies have it from 1.43 on.
            on_round: called with the round and the result so far, at the moments of evaluate_fn.
        """
        timeout = self.training.round_timeout if timeout is None else timeout
        train_config = _checked_config(train_config)
        evaluate_config = _checked_config(evaluate_config)
        if not isinstance(initial_arrays, ArrayRecord):
            raise ValueError(
                "initial_arrays must be an ArrayRecord, got a "
                f"{type(initial_arrays).__name__}: wrap it, as in ArrayRecord(module.state_dict())"
            )
        check_initial("initial_arrays", initial_arrays, self.training.replies)
        # once it is closed, another strategy may go on in checkpoint_dir
        with closing(self), self._account.facts.noting_errors():
            first, last = self._plan(num_rounds)
            result = Result(arrays=self._latest_arrays(initial_arrays))
            if last > first:
                self._note_sent(result.arrays)
                self._curator.say_whether_it_can_learn(self._layout.size)
                self._check_clients(grid, timeout)
                for name in self._account.pending_releases:
                    request = self._curator.request_before(name)
                    self._run_sum(request, grid, ConfigRecord(), timeout)
            for round_ in range(first, last + 1):
                if round_ > first:
                    self._note_sent(result.arrays)
                    request = self._curator.request(round_, len(self._w))
                    result.arrays, metrics = self._run_sum(request, grid, train_config, timeout)
                    result.train_metrics_clientapp[round_] = metrics
                messages = self.configure_evaluate(round_, result.arrays, evaluate_config, grid)
                if messages:
                    replies = ask(grid, messages, timeout, size=0)
                    measures = self.aggregate_evaluate(round_, replies)
                    if measures is not None:
                        result.evaluate_metrics_clientapp[round_] = measures
                central = evaluate_fn(round_, result.arrays) if evaluate_fn else None
                if central is not None:
                    result.evaluate_metrics_serverapp[round_] = central
                self._log_round(round_, last, result)
                if on_round:
                    on_round(round_, result)
                if round_ > first and should_stop and should_stop(round_, result):
                    log.info("should_stop has ended the training after round %d", round_)
                    break
            result.arrays = self.averaged(result.arrays)
            self._deliver(grid, result.arrays, timeout)
            log.info("%s", self.privacy_data()["short"])
            return result

    def _plan(self, num_rounds: int | None) -> tuple[int, int]:
        """The round to go on from, and the last one that the budget pays for."""
        rounds = self._account.plan(num_rounds, FLOWER_ROUNDS)
        first = self.rounds_done
        if num_rounds and num_rounds <= first:
            log.warning(
                "All %d rounds are done already: num_rounds is the total, give more to go on", first
            )
        log.info("Starting PPSGD for %d rounds:", rounds)
        self.summary()
        return first, max(first, rounds)

    def _check_clients(self, grid: Grid, timeout: float) -> None:
        """Ask a few clients whether they would obey an Order: no data are read, nothing charged."""
        if self.training.replies == "parameters":
            return
        nodes = self._curator.everybody(lambda: present_in(grid))[:ENOUGH_ASKED]
        order = self._curator.order(self._curator.request(self.rounds_done))
        content = self._signed_content(order, self._arrays, MessageType.QUERY, grid)
        messages = _messages(nodes, content, MessageType.QUERY)
        refusals = refusals_of(grid, messages, timeout, _size_of(self._arrays))
        self._curator.refuse_if_nobody_obeys(len(messages), refusals)

    def _run_sum(
        self, request: SumRequest, grid: Grid, config: ConfigRecord, timeout: float
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Ask for a sum and publish it: one exchange if it is plain, four if it is secure."""
        opened = self._open_sum(request, grid)
        for payloads in opened.exchanges():
            messages = self._exchange_messages(opened, payloads, config, grid)
            self._take_replies(opened, ask(grid, messages, timeout, _size_of(self._arrays)))
        arrays, released = self._publish(opened)
        self._curator.refuse_to_go_on()
        return arrays, MetricRecord({**released})

    def _open_sum(self, request: SumRequest, grid: Grid) -> OpenSum:
        run = grid.run.run_id if self.training.secure else 0
        nbytes = _size_of(self._arrays)
        return self._curator.open_sum(request, lambda: present_in(grid), nbytes, run)

    def _log_round(self, round_: int, last: int, result: Result) -> None:
        """One line: ε so far, and the measures that exist."""
        measured = {
            "clients": result.evaluate_metrics_clientapp.get(round_),
            "evaluate_fn": result.evaluate_metrics_serverapp.get(round_),
        }
        parts = [f"epsilon {rounded_up(self._account.epsilon_so_far())}"]
        for where, measures in measured.items():
            words = []
            for name, value in (measures or {}).items():
                text = f"{value:.4g}" if isinstance(value, float) else str(value)
                words.append(f"{name} {text}")
            if words:
                parts.append(f"{where}: {', '.join(words)}")
        if round_ or len(parts) > 1:
            log.info("[ROUND %d/%d] %s", round_, last, " · ".join(parts))

    def _deliver(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> None:
        """Bring the last w of the recipe to everybody; the reply is empty, whatever it is.

        Nodes that have answered the last evaluation have it already.
        """
        if self.training.recipe is None:
            return
        everybody = self._curator.everybody(lambda: present_in(grid))
        nodes = [node for node in everybody if node not in self._delivered]
        order = self._curator.evaluation_order(self.rounds_done, last=True, measured=False)
        content = self._signed_content(order, arrays, MessageType.EVALUATE, grid)
        messages = _messages(nodes, content, MessageType.EVALUATE)
        for _ in ask(grid, messages, timeout, size=0):
            pass

    # --- one round, by Flower's hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Budget, cohort from the enrolled population, then w and an Order to those online."""
        refuse_dp_strategy("PPSGD")
        if self.training.secure:
            raise ValueError(
                "a secure sum takes four exchanges per round, and configure_train is one: call "
                "start, which runs them, or leave out aggregation"
            )
        config = _checked_config(config)
        self._note_sent(arrays)
        opened = self._open_sum(self._curator.request(server_round, len(self._w)), grid)
        (payloads,) = opened.exchanges()
        return self._exchange_messages(opened, payloads, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """One noisy step; each reply is a vector or zero."""
        opened = self._curator.open_sum_of(server_round)
        self._take_replies(opened, replies)
        arrays, released = self._publish(opened)
        return arrays, MetricRecord({**released})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every enrolled node online, if evaluation is due; round 0 is before training."""
        nodes = self._curator.evaluators(server_round, lambda: present_in(grid))
        if not nodes:
            return []
        arrays = self.averaged(arrays)
        config = _checked_config(config)
        if self.training.replies == "parameters":
            content = content_in_both_forms("evaluate", arrays, config, server_round)
        else:
            last = server_round == self._account.last_round
            order = self._curator.evaluation_order(server_round, last=last)
            content = self._signed_content(order, arrays, MessageType.EVALUATE, grid, config=config)
        return _messages(nodes, content, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Mean over users, weighted by their number of examples. Outside the guarantee."""
        log.debug("Round %d: metrics from client data are outside the guarantee", server_round)
        answered = list(replies)
        good = [reply for reply in answered if reply.has_content()]
        failures = [str(reply.error.reason) for reply in answered if reply.has_error()]
        self._account.facts.note_failed_evaluations(server_round, failures, len(good))
        if server_round == self._account.last_round:
            self._delivered = {reply.metadata.src_node_id for reply in good}
        records = [measures_in(reply.content) for reply in good]
        means = mean_of(record for record in records if record is not None)
        return MetricRecord({**means}) if means else None

    # --- translation

    def _signed_content(
        self,
        order: Order,
        arrays: ArrayRecord | None,
        kind: str,
        grid: Grid,
        *,
        config: Mapping[str, Any] | None = None,
        payload: bytes = b"",
    ) -> RecordDict:
        """What a client gets: w, a config with the round as Flower sends it, and the Order last,
        which holds the hash of the payload of a secure sum."""
        content = RecordDict(
            {CONFIG: ConfigRecord({**(config or {}), "server-round": order.round})}
        )
        if arrays is not None:
            content[ARRAYS] = arrays
        if payload:
            content[SECURE] = ConfigRecord({DATA: payload})
            order = replace(order, payload=payload_hash(payload))
        content[ORDER] = ConfigRecord(self._signed_order(order, arrays, kind, grid.run.run_id))
        return content

    def _exchange_messages(
        self, opened: OpenSum, payloads: Payloads, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One message to each node of an exchange; those who get the same share its content."""
        contents: dict[bytes, RecordDict] = {}
        if self.training.replies == "parameters":
            round_ = opened.request.round
            contents[b""] = content_in_both_forms("fit", self._arrays, config, round_)
        else:
            order = self._curator.order(opened.request, opened.stage)
            with_w = opened.stage in (PLAIN_STAGE, SecureStage.MASKED)
            arrays = self._arrays if with_w else None
            for payload in set(payloads.values()):
                contents[payload] = self._signed_content(
                    order, arrays, MessageType.TRAIN, grid, config=config, payload=payload
                )
        messages = [
            Message(contents[payload], cast(int, node), MessageType.TRAIN)
            for node, payload in payloads.items()
        ]
        # a grid fills in the message ids when it sends them
        self._asked = [message.metadata for message in messages]
        return messages

    def _take_replies(self, opened: OpenSum, replies: Iterable[Message]) -> None:
        """Hand each reply to the sum, as what was sent or as a failure."""
        asked = {each.message_id: each.dst_node_id for each in self._asked if each.message_id}
        # InProcessGrid forgets each reply once it is read
        for reply in getattr(replies, "once", replies.__iter__)():
            node = answered_node(reply, asked)
            opened.take(node, partial(self._read_reply, reply, opened))

    def _read_reply(self, reply: Message, opened: OpenSum) -> Sent:
        """What one client sent; an exception if nothing of it can be used."""
        if reply.has_error():
            detail = f"error {reply.error.code}: {last_line(str(reply.error.reason))}"
            raise UnusableError("client error", detail)
        if opened.stage == PLAIN_STAGE:
            return self._vector_in(reply.content, opened.request)
        return secure_message_in(reply.content, opened.stage, opened.request.size)


def _size_of(arrays: ArrayRecord) -> int:
    """The bytes of the serialised arrays."""
    return sum(len(array.data) for array in arrays.values())


def _checked_config(config: ConfigRecord | None) -> ConfigRecord:
    """What is sent along, empty unless given; ValueError if it is not Flower's record."""
    if config is None:
        return ConfigRecord()
    if not isinstance(config, ConfigRecord):
        raise ValueError(
            f"config must be a ConfigRecord, got a {type(config).__name__}: wrap it, as in "
            "ConfigRecord({...})"
        )
    return config


def _messages(nodes: Iterable[Identity], content: RecordDict, kind: str) -> list[Message]:
    """The same content to each node."""
    return [Message(content, cast(int, node), kind) for node in nodes]
