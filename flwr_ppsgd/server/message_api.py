"""PPSGD as a Flower strategy (Message API): translate, call the rounds, translate back."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from flwr_ppsgd.algorithm import PrivateMetrics, Release, SecureSum, Steps
from flwr_ppsgd.arrays import bytes_of, record_from
from flwr_ppsgd.callers import refuse_dp_strategy
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.recipe import Recipe, Task
from flwr_ppsgd.recipe import recipe as make_recipe
from flwr_ppsgd.secure.participant import Session
from flwr_ppsgd.server.enrolment import present_in
from flwr_ppsgd.server.fetch import ask, essence, refusals_of
from flwr_ppsgd.server.numpy_clients import Addressing, failure, measured, trained
from flwr_ppsgd.server.numpy_clients import Task as Kind
from flwr_ppsgd.server.rounds import OpenRound, Reply, Rounds, mean_of, refuse_other_model
from flwr_ppsgd.server.secure_rounds import (
    Exchange,
    Purpose,
    SecureAnswers,
    SecureGradients,
    SecureRound,
)
from flwr_ppsgd.server.training import Identity, ReplyKind, Training
from flwr_ppsgd.settings import RUN_CONFIG, Settings, named_in_keys
from flwr_ppsgd.signature import digest
from flwr_ppsgd.wire import (
    ARRAYS,
    CONFIG,
    DATA,
    GRADIENT,
    MASKED,
    METRICS,
    ORDER,
    SECURE,
    SIZE,
    UNIT,
    VARIANCE,
    Layout,
)

log = logging.getLogger("flwr.ppsgd")

FLOWER_ROUNDS = 3  # of a Flower strategy, if nobody says how many


class PPSGD(Strategy):
    """Personalized-Private-SGD: clip, sum, divide by a public number, add noise, step w.

    Args:
        release: what is published in a round.
        steps: how far w and θ move.
        delta: δ at which the guarantee is stated.
        aggregation: ``SecureSum`` if clients add the noise and the server sees sums only; short for
            a release that says so.

    The other arguments are explained where they are defined: ``flwr_ppsgd.server.training``.
    """

    def __init__(
        self,
        *,
        release: Release,
        steps: Steps,
        delta: float,
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
        aggregation: SecureSum | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        self.training = Training.of(
            release=release,
            aggregation=aggregation,
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
        self._rounds = Rounds(self.training)
        self._curator = self._rounds.curator
        self._addressing = Addressing()
        self._asked: list[Metadata] = []
        self._arrays = ArrayRecord()
        self._delivered: set[Identity] = set()  # nodes that have the last w of the recipe
        self._latest = self._resumed()

    @classmethod
    def from_config(cls, run_config: Mapping[str, Any], **more: Any) -> Self:
        """From the flat keys of a Flower run config.

        Args:
            run_config: flat keys, as of ``flwr_ppsgd.settings.Settings``.
            more: arguments as of ``PPSGD``, which come before the run config's.
        """
        settings = Settings.from_run_config(run_config)
        given = {**settings.arguments(), **more}
        with named_in_keys(RUN_CONFIG):
            return cls(**given)

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
            more: arguments as of ``PPSGD``, which come before the recipe's.
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
    def release(self) -> Release:
        """What is published in a round."""
        return self.training.release

    @property
    def steps(self) -> Steps:
        """How far w and θ move."""
        return self.training.steps

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._curator.ledger

    @property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for; None if there is no limit."""
        return self._curator.affordable_rounds

    @property
    def rounds_done(self) -> int:
        """The last round that was published, restarts included."""
        return self._curator.rounds_done

    @property
    def enrols_whoever_comes(self) -> bool:
        """Whether the population is the first nodes seen, rather than a list that was given."""
        return self._rounds.open_enrolment

    def note_evaluation(self) -> None:
        """From now on every statement says that there was evaluation on client data."""
        self._curator.note_evaluation()

    def privacy_statement(self) -> str:
        """The guarantee in words."""
        return self._curator.promise().statement()

    def privacy_data(self) -> dict[str, object]:
        """The guarantee as data, ready for JSON."""
        size = self._layout(self._arrays).size if self._arrays else 0
        return self._curator.promise(size).as_data()

    def published(self, arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
        """What everybody may have after training by ``auto``: w, its noise ν, the unit, the size.

        ``numpy.savez("model.npz", **strategy.published(result.arrays))`` keeps it;
        ``personalize`` makes the model of somebody who never took part from it.

        Args:
            arrays: w, as of ``result.arrays``.
        """
        values = self._curator.values
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
        log.info("\t└──> %s", self._rounds.private.where)

    def start(  # noqa: PLR0917 - Flower's own signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        on_round: Callable[[int, Result], None] | None = None,
    ) -> Result:
        """Train for ``num_rounds`` rounds, or as many as the budget pays for.

        Args:
            grid: the nodes.
            initial_arrays: w before the first round. One strategy is one training: a second call,
                or one that finds a training in ``checkpoint_dir``, goes on from where it was.
            num_rounds: the total, earlier calls and restarts included. Unless given, the number
                that ``auto`` has planned, or 3.
            timeout: of a round, in seconds; ``round_timeout`` unless given.
            train_config: sent to the clients in training.
            evaluate_config: sent to the clients in evaluation.
            evaluate_fn: called with the absolute round and w, before the first round and after
                each.
            on_round: called with the round and the result so far, at the same moments.
        """
        if timeout is None:
            timeout = self.training.round_timeout
        _check_initial(initial_arrays)
        train_config = _checked_config(train_config)
        evaluate_config = _checked_config(evaluate_config)
        num_rounds = self.training.rounds_or(num_rounds, FLOWER_ROUNDS)
        try:
            first, last = self._plan(num_rounds)
            result = Result(arrays=self._beginning(initial_arrays))
            if last > first:
                self._rounds.say_whether_it_can_learn(self._layout(result.arrays).size)
                self._check_clients(grid, result.arrays, timeout)
                self._ask_before(grid, result.arrays, timeout)
            for round_ in range(first, last + 1):
                if round_ > first:
                    self._run_round(round_, result, grid, timeout, train_config)
                self._run_evaluation(round_, result, grid, timeout, evaluate_config)
                central = evaluate_fn(round_, result.arrays) if evaluate_fn else None
                if central is not None:
                    log.info("Round %d: evaluate_fn measured %s", round_, dict(central))
                    result.evaluate_metrics_serverapp[round_] = central
                if on_round:
                    on_round(round_, result)
            log.info("%s", self.privacy_statement())
            result.arrays = self.averaged(result.arrays)
            self._deliver(grid, result.arrays, timeout)
            return result
        except BaseException as error:
            self._rounds.private.note_error(error)
            raise
        finally:
            self._curator.close()  # another strategy may go on in checkpoint_dir

    def _plan(self, num_rounds: int) -> tuple[int, int]:
        """The round to go on from, and the last one that the budget pays for."""
        if self._curator.reopen():
            self._latest = self._resumed()
        rounds = self._rounds.plan(num_rounds)
        first = self.rounds_done
        if 0 < num_rounds <= first:
            log.warning(
                "All %d rounds are done already: num_rounds is the total, give more to go on", first
            )
        log.info("Starting PPSGD for %d rounds:", rounds)
        self.summary()
        return first, max(first, rounds)

    def _check_clients(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> None:
        """Ask a few clients whether they would obey an Order: no data are read, nothing charged."""
        if self.training.replies != "gradient":
            return
        nodes = self._rounds.to_check(lambda: present_in(grid))
        content = self._content("fit", self.rounds_done, arrays, ConfigRecord())
        messages = _messages(nodes, content, MessageType.QUERY)
        refusals = refusals_of(grid, messages, timeout, _size(arrays))
        self._rounds.refuse_if_nobody_obeys(len(messages), refusals)

    def _ask_before(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> None:
        """Ask everybody for what the recipe releases before the first round, unless it was."""
        for name in self._curator.pending:
            if self.training.secure:
                purpose = SecureAnswers(self._curator, name)
                self._run_secure(0, purpose, grid, (arrays, ConfigRecord()), timeout, name)
                self._rounds.publish_before(name)
                continue
            nodes = self._rounds.open_before(name, lambda: present_in(grid))
            order = self._rounds.before_order(name, arrays)
            content = _with_order(order, {ARRAYS: arrays, CONFIG: _with_round(ConfigRecord(), 0)})
            messages = _messages(nodes, content, MessageType.TRAIN)
            self._asked = [message.metadata for message in messages]
            replies = ask(grid, messages, timeout, _size(arrays))
            self._take(self._rounds.opened(0), replies)
            self._rounds.publish_before(name)

    def _deliver(self, grid: Grid, arrays: ArrayRecord, timeout: float) -> None:
        """Bring the last w of the recipe to everybody; the reply is empty, whatever it is.

        Whoever has answered the last evaluation has it already.
        """
        if self.training.recipe is None:
            return
        everybody = self._rounds.everybody(lambda: present_in(grid))
        nodes = [node for node in everybody if node not in self._delivered]
        order = self._rounds.last_order(arrays, measured=False)
        config = _with_round(ConfigRecord(), self.rounds_done)
        content = _with_order(order, {ARRAYS: arrays, CONFIG: config})
        for _ in ask(grid, _messages(nodes, content, MessageType.EVALUATE), timeout, size=0):
            pass

    def _run_round(
        self, round_: int, result: Result, grid: Grid, timeout: float, config: ConfigRecord
    ) -> None:
        if self.training.secure:
            refuse_dp_strategy("PPSGD")
            self._arrays = result.arrays
            w = self._layout(result.arrays).flatten(result.arrays)
            columns = self._layout(result.arrays).columns
            purpose = SecureGradients(self._curator, round_, w, columns)
            self._run_secure(round_, purpose, grid, (result.arrays, config), timeout)
            result.arrays, metrics = self._published(round_)
        else:
            messages = self.configure_train(round_, result.arrays, config, grid)
            replies = ask(grid, messages, timeout, _size(result.arrays))
            result.arrays, metrics = self.aggregate_train(round_, replies)
        result.train_metrics_clientapp[round_] = metrics
        spent = rounded_up(cast(float, metrics["epsilon"]))
        last = self._rounds.last_round
        log.info("[ROUND %d/%d] epsilon so far at most %s", round_, last, spent)
        self._rounds.refuse_to_go_on()

    def _run_secure(  # noqa: PLR0917
        self,
        round_: int,
        purpose: Purpose,
        grid: Grid,
        sent: tuple[ArrayRecord, ConfigRecord],
        timeout: float,
        before: str = "",
    ) -> None:
        """The four exchanges of a secure sum, each with the timeout of a round."""
        session = Session(
            training=self._curator.training_id,
            run=grid.run.run_id,
            start=len(self._curator.starts()),
            round=round_,
            part=before or self._rounds.asked_in_rounds,
        )
        secure = SecureRound(self._curator, session, purpose)
        if round_:
            nodes = self._rounds.open_for(secure, round_, lambda: present_in(grid))
        else:
            nodes = self._rounds.open_before(before, lambda: present_in(grid), secure)
        opened = self._rounds.opened(round_)
        for exchange in secure.exchanges(list(nodes)):
            if exchange.stage > 1:
                opened.ask_again(exchange.payloads)
            messages = self._staged(round_, exchange, sent, before)
            self._asked = [message.metadata for message in messages]
            replies = ask(grid, messages, timeout, _size(sent[0]))
            self._take(opened, replies)

    def _staged(
        self,
        round_: int,
        exchange: Exchange,
        sent: tuple[ArrayRecord, ConfigRecord],
        before: str,
    ) -> list[Message]:
        """One message to each client of an exchange; w travels only if it is needed."""
        arrays, config = sent
        records: dict[str, Any] = {CONFIG: _with_round(config, round_)}
        if exchange.brings_w:
            records[ARRAYS] = arrays
        w_digest = digest(bytes_of(arrays) if exchange.brings_w else {})
        payloads = cast(Mapping[Identity, bytes], exchange.payloads)
        orders = self._rounds.staged_orders(round_, exchange.stage, payloads, w_digest, before)
        contents = {}  # those who get the same share one
        for node, order in orders.items():
            payload = payloads[node]
            if payload not in contents:
                more = {}
                if payload:
                    more = {SECURE: ConfigRecord({DATA: payload})}
                contents[payload] = _with_order(order, {**records, **more})
        return [
            Message(contents[payload], cast(int, node), MessageType.TRAIN)
            for node, payload in payloads.items()
        ]

    def _run_evaluation(
        self, round_: int, result: Result, grid: Grid, timeout: float, config: ConfigRecord
    ) -> None:
        messages = self.configure_evaluate(round_, result.arrays, config, grid)
        if not messages:
            return
        replies = ask(grid, messages, timeout, size=0)
        metrics = self.aggregate_evaluate(round_, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[round_] = metrics

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
        layout = self._layout(arrays)
        w = layout.flatten(arrays)
        nodes = self._rounds.open(server_round, w, layout, lambda: present_in(grid))
        content = self._content("fit", server_round, arrays, config)
        messages = _messages(nodes, content, MessageType.TRAIN)
        self._arrays = arrays
        # a grid fills in the message ids when it sends them
        self._asked = [message.metadata for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """One noisy step; each reply is a vector or zero."""
        self._take(self._rounds.opened(server_round), replies)
        return self._published(server_round)

    def _published(self, server_round: int) -> tuple[ArrayRecord, MetricRecord]:
        """The new w, saved, and what is released along with it."""
        w, released = self._rounds.publish(server_round)
        arrays = self._arrays
        if self.steps.publishes:
            arrays = self._layout(arrays).unflatten(w, like=arrays)
        self._curator.save(bytes_of(arrays))
        self._latest = arrays
        return arrays, MetricRecord({**released})

    def _take(self, opened: OpenRound, replies: Iterable[Message]) -> None:
        """Add each reply to what was asked for."""
        asked = {each.message_id: each.dst_node_id for each in self._asked if each.message_id}
        # InProcessGrid forgets each reply once it is read
        for reply in getattr(replies, "once", replies.__iter__)():
            node = _answered_node(reply, asked)
            opened.take(node, functools.partial(self._reply, reply))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every enrolled node online, if evaluation is due; round 0 is before training."""
        nodes = self._rounds.evaluators(server_round, lambda: present_in(grid))
        if not nodes:
            return []
        content = self._content("evaluate", server_round, self.averaged(arrays), config)
        return _messages(nodes, content, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Mean over users, weighted by their number of examples. Outside the guarantee."""
        log.debug("Round %d: metrics from client data are outside the guarantee", server_round)
        answered = list(replies)
        failures = [str(reply.error.reason) for reply in answered if reply.has_error()]
        self._rounds.note_failed_evaluations(server_round, failures, len(answered) - len(failures))
        for reply in answered:
            self._addressing.hear(reply)
        if server_round == self._rounds.last_round:
            good = (reply for reply in answered if reply.has_content())
            self._delivered = {reply.metadata.src_node_id for reply in good}
        records = [measured(reply.content) for reply in answered if reply.has_content()]
        means = mean_of(record for record in records if record is not None)
        return MetricRecord({**means}) if means else None

    def averaged(self, arrays: ArrayRecord) -> ArrayRecord:
        """The average iterate, if ``average`` is on; ``arrays`` otherwise."""
        if not self._curator.averages:
            return arrays
        layout = self._layout(arrays)
        average = self._curator.averaged(layout.flatten(arrays))
        return layout.unflatten(average, like=arrays)

    def close(self) -> None:
        """Give up the lock on ``checkpoint_dir``, so that another strategy can go on there."""
        self._curator.close()

    def _resumed(self) -> ArrayRecord | None:
        """The w that was found in ``checkpoint_dir``; None if there is none."""
        found = self._curator.resumed
        return None if found is None else record_from(found.arrays)

    def _beginning(self, initial: ArrayRecord) -> ArrayRecord:
        """The w to go on from: that of the last round, if there was one and it has this form."""
        if self._latest is None:
            return initial
        refuse_other_model(self._layout(self._latest), self._layout(initial))
        return self._latest

    def _content(
        self, task: Kind, round_: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """What a client gets.

        One that returns parameters gets what Flower's stock strategies send.
        """
        if self.training.replies == "parameters":
            return self._addressing.content(task, arrays, config, round_)
        order = self._order(task, round_, arrays)
        config = _with_round(_checked_config(config), round_)
        return _with_order(order, {ARRAYS: arrays, CONFIG: config})

    def _order(self, task: Kind, round_: int, arrays: ArrayRecord) -> dict[str, Any]:
        """The Order of a round, or that of an evaluation; the last one brings the recipe's w."""
        if task == "fit":
            return self._rounds.order(round_, arrays)
        if self.training.recipe is not None and round_ == self._rounds.last_round:
            return self._rounds.last_order(arrays, measured=True)
        return self._rounds.measuring_order(round_, arrays)

    def _reply(self, message: Message) -> Reply:
        """The arrays of a message and its measures, and nothing else of it."""
        if self.training.replies == "gradient":
            return _reply(message, GRADIENT)
        self._addressing.hear(message)
        if message.has_error() or ARRAYS in message.content:
            return _reply(message, ARRAYS)
        content = message.content
        arrays = trained(content, self._arrays)
        return Reply(arrays, error=failure(content), found=content)

    def _layout(self, arrays: ArrayRecord) -> Layout:
        return Layout.of(arrays, self._rounds.hold())


def _check_initial(arrays: object) -> None:
    """ValueError unless w came as Flower's record."""
    if not isinstance(arrays, ArrayRecord):
        raise ValueError(
            f"initial_arrays must be an ArrayRecord, got a {type(arrays).__name__}: wrap it, as in "
            "ArrayRecord(module.state_dict())"
        )


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


def _with_round(config: ConfigRecord, round_: int) -> ConfigRecord:
    """The user's config with ``server-round``, as Flower's strategies send it; theirs stays."""
    return ConfigRecord({**config, "server-round": round_})


def _with_order(order: Mapping[str, Any], records: Mapping[str, Any]) -> RecordDict:
    """What is sent along with an Order, and the Order last."""
    return RecordDict({**records, ORDER: ConfigRecord({**order})})


def _messages(nodes: Iterable[Identity], content: RecordDict, kind: str) -> list[Message]:
    """The same content to each node."""
    return [Message(content, cast(int, node), kind) for node in nodes]


def _size(arrays: ArrayRecord) -> int:
    """The number of bytes of the serialised arrays."""
    return sum(len(array.data) for array in arrays.values())


def _reply(message: Message, name: str) -> Reply:
    """The named record of a message and its measures, and nothing else of it."""
    if message.has_error():
        return Reply(error=f"error {message.error.code}: {essence(str(message.error.reason))}")
    records = message.content
    arrays = records.get(name, records.get(MASKED))
    measures = records.get(METRICS)
    secure = records.get(SECURE)
    payload = secure.get(DATA) if isinstance(secure, ConfigRecord) else None
    return Reply(
        payload=payload if isinstance(payload, bytes) else b"",
        arrays=arrays if isinstance(arrays, ArrayRecord) else None,
        measures=measures if isinstance(measures, MetricRecord) else {},
        found=records,
    )


def _answered_node(reply: Message, asked: Mapping[str, int]) -> int | None:
    """The asked node that a reply answers for.

    By the message it replies to, if it names one, else by its source. What one node says in
    another's name counts for nobody. Errors may come from Flower itself, as node 1.
    """
    metadata = reply.metadata
    answered = metadata.reply_to_message_id
    source = metadata.src_node_id
    if not (answered and asked):
        return source
    node = asked.get(answered)
    return node if node == source or reply.has_error() else None
