"""PPSGD as a Flower strategy (Message API): translate, call the curator, translate back."""

import logging
from collections.abc import Callable, Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_ppsgd import statement
from flwr_ppsgd.algorithm import Release, Steps
from flwr_ppsgd.curator import Curator
from flwr_ppsgd.enrolment import Enrolment
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.replies import OpenRound, gradient, nothing, weighted_mean
from flwr_ppsgd.wire import ARRAYS, CONFIG, ORDER, Layout, Order

log = logging.getLogger("flwr.ppsgd")


class PPSGD(Strategy):
    """Personalized-Private-SGD: clip, sum, divide by a public number, add noise, step w.

    release, steps: what is published in a round, and how far w and θ move.
    delta, max_epsilon, insecure_seed: see ``Curator``.
    evaluate_every: ask all enrolled nodes to evaluate every so many rounds; 0 is never. The results are outside the
        guarantee.
    enrolled: node ids of the population. Default: the first ``population`` nodes seen.
    min_online: share of the population to wait for before the first round. Whoever is offline later counts as zero.
    """

    def __init__(
        self,
        *,
        release: Release,
        steps: Steps,
        delta: float,
        max_epsilon: float | None = None,
        evaluate_every: int = 0,
        enrolled: Iterable[int] | None = None,
        min_online: float = 0.5,
        insecure_seed: int | None = None,
    ) -> None:
        self._curator = Curator(release, steps, delta, max_epsilon, insecure_seed)
        self._enrolment = Enrolment(release.cohort.population, enrolled, min_online)
        if evaluate_every < 0:
            raise ValueError(f"evaluate_every must not be negative, got {evaluate_every!r}: 0 is never")
        self.evaluate_every = evaluate_every
        self._round: OpenRound | None = None

    @property
    def release(self) -> Release:
        return self._curator.release

    @property
    def steps(self) -> Steps:
        return self._curator.steps

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._curator.ledger

    @property
    def affordable_rounds(self) -> int | None:
        """How many rounds the budget pays for; None where there is no limit."""
        return self._curator.affordable_rounds

    def privacy_statement(self) -> str:
        """The guarantee in words."""
        return statement.in_words(self._curator, evaluated=self.evaluate_every > 0)

    def privacy_data(self) -> dict[str, object]:
        """The guarantee as data, ready for JSON."""
        size = self._round.layout.size if self._round else 0
        return statement.as_data(self._curator, evaluated=self.evaluate_every > 0, size=size)

    def summary(self) -> None:
        """Log the settings that make up the promise."""
        log.info("\t├──> %s", self.release)
        log.info("\t└──> %s (alpha·Q = %g)", self.steps, self.steps.alpha_q)

    def start(  # noqa: PLR0917 - Flower's own signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        on_round: Callable[[int, Result], None] | None = None,
    ) -> Result:
        """Train for ``num_rounds`` rounds, or as many as the budget pays for.

        ``evaluate_fn`` is called with the absolute round and w, ``on_round`` with the round and the result so far; both
        before the first round and after each.
        """
        rounds = self._curator.plan(num_rounds)
        log.info("Starting PPSGD for %d rounds:", rounds)
        self.summary()
        result = Result(arrays=initial_arrays)
        for round_ in range(rounds + 1):
            if round_:
                self._run_round(round_, result, grid, timeout, train_config or ConfigRecord())
            self._run_evaluation(round_, result, grid, timeout, evaluate_config or ConfigRecord())
            central = evaluate_fn(round_, result.arrays) if evaluate_fn else None
            if central is not None:
                result.evaluate_metrics_serverapp[round_] = central
            if on_round:
                on_round(round_, result)
        log.info("%s", self.privacy_statement())
        return result

    def _run_round(self, round_: int, result: Result, grid: Grid, timeout: float, config: ConfigRecord) -> None:
        messages = self.configure_train(round_, result.arrays, config, grid)
        replies = grid.send_and_receive(messages, timeout=timeout)
        result.arrays, result.train_metrics_clientapp[round_] = self.aggregate_train(round_, replies)

    def _run_evaluation(self, round_: int, result: Result, grid: Grid, timeout: float, config: ConfigRecord) -> None:
        messages = list(self.configure_evaluate(round_, result.arrays, config, grid))
        if not messages:
            return
        metrics = self.aggregate_evaluate(round_, grid.send_and_receive(messages, timeout=timeout))
        if metrics is not None:
            result.evaluate_metrics_clientapp[round_] = metrics

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Budget, then the cohort from the enrolled population, then w and an Order to each of its members online."""
        self._curator.check_budget(server_round)
        online = self._enrolment.refresh(grid)
        drawn = self._enrolment.nodes(self._curator.draw(server_round))
        layout = Layout.of(arrays)
        order = Order(
            round=server_round,
            step=self.steps.personal,
            clip_norm=self.release.clip_norm,
            reduction=self.release.reduction,
            publishes=self.steps.publishes,
        )
        content = RecordDict({ARRAYS: arrays, CONFIG: config, ORDER: order.to_record()})
        messages = [Message(content, node, MessageType.TRAIN) for node in drawn if node in online]
        self._round = OpenRound(server_round, arrays, layout, messages)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """One noisy step. Whatever the replies are, it is taken and charged: an empty cohort still releases noise."""
        opened = self._round
        if opened is None or opened.number != server_round or opened.closed:
            raise ValueError(
                f"aggregate_train({server_round}) without configure_train({server_round}) before it: no cohort was "
                "drawn for that round and nothing was released; call the two in turn"
            )
        opened.closed = True
        total = self._curator.open_sum(opened.layout.size if self.steps.publishes else 0)
        for vector in opened.usable(replies, gradient if self.steps.publishes else nothing):
            total.add(vector)
        opened.report()
        w = self._curator.publish(server_round, opened.w, total)
        arrays = opened.layout.unflatten(w) if self.steps.publishes else opened.arrays
        return arrays, MetricRecord({"epsilon": self.ledger.quick_epsilon()})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every enrolled node online, in the rounds that ``evaluate_every`` names; round 0 is before training."""
        if not self.evaluate_every or server_round % self.evaluate_every:
            return []
        online = self._enrolment.refresh(grid)
        content = RecordDict({ARRAYS: arrays, CONFIG: config})
        return [Message(content, node, MessageType.EVALUATE) for node in self._enrolment.known if node in online]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean over users, weighted by their number of examples. Outside the guarantee."""
        log.debug("Round %d: metrics from client data are outside the guarantee", server_round)
        return weighted_mean(reply.content for reply in replies if reply.has_content())
