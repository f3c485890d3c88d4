"""PPSGD as a Flower strategy (Message API): translate, call the curator, translate back."""

import fnmatch
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_ppsgd import promise as statement
from flwr_ppsgd.algorithm import Release, Steps, Vector
from flwr_ppsgd.privacy import Ledger
from flwr_ppsgd.server.curator import Curator, PrivateMetrics
from flwr_ppsgd.server.enrolment import Enrolment, Identity, present_in
from flwr_ppsgd.server.rounds import OpenRound, UnusableError, ask, not_configured, order_for
from flwr_ppsgd.server.tensorboard import Scalars
from flwr_ppsgd.settings import Settings
from flwr_ppsgd.wire import ARRAYS, CONFIG, GRADIENT, METRICS, NUM_EXAMPLES, ORDER, Layout, record_from

log = logging.getLogger("flwr.ppsgd")

ReplyKind: TypeAlias = Literal["gradient", "parameters"]
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")  # BatchNorm's buffers in a state_dict


class PPSGD(Strategy):
    """Personalized-Private-SGD: clip, sum, divide by a public number, add noise, step w.

    release, steps: what is published in a round, and how far w and θ move.
    delta, max_epsilon, insecure_seed, average, checkpoint_dir, checkpoint_every, metrics: see ``Curator``. With
        ``average`` the result's arrays are the average iterate.
    evaluate_every: ask all enrolled nodes to evaluate every so many rounds; 0 is never. The results are outside the
        guarantee.
    enrolled: the population, by node id or, for nodes that outlive a restart, by the name or public key under which
        they are registered. Default: the first ``population`` nodes seen.
    min_online: share of the population to wait for before the first round. Whoever is offline later counts as zero.
    round_timeout: seconds after which a round goes on with the replies it has; whoever is later counts as zero.
    tensorboard_dir: where curves of ε by round go, if TensorBoard is installed.
    replies: "gradient" for clients made by ``client_app``; "parameters" for any client that returns trained
        parameters w_i, whose w − w_i is then clipped as the gradient. Whole-number arrays and BatchNorm's running
        statistics are not part of w there: they travel to the clients and keep their initial values.
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
        round_timeout: float = 3600.0,
        replies: ReplyKind = "gradient",
        average: bool = False,
        checkpoint_dir: Path | str | None = None,
        checkpoint_every: int = 1,
        metrics: PrivateMetrics | None = None,
        tensorboard_dir: Path | str | None = None,
        insecure_seed: int | None = None,
    ) -> None:
        if evaluate_every < 0:
            raise ValueError(f"evaluate_every must not be negative, got {evaluate_every!r}: 0 is never")
        if not round_timeout > 0:
            raise ValueError(f"round_timeout must be positive, got {round_timeout!r}: it is in seconds")
        if replies not in ("gradient", "parameters"):
            raise ValueError(f"replies must be 'gradient' or 'parameters', got {replies!r}")
        if metrics is not None and replies != "gradient":
            raise ValueError("private metrics need clients that know of them: use replies='gradient'")
        self._curator = Curator(
            release,
            steps,
            delta=delta,
            max_epsilon=max_epsilon,
            insecure_seed=insecure_seed,
            average=average,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            metrics=metrics,
        )
        self._enrolment = Enrolment(release.cohort.population, enrolled, min_online)
        self._scalars = Scalars(tensorboard_dir)
        self.round_timeout = round_timeout
        self.evaluate_every = evaluate_every
        self.replies = replies
        self._last_round = -1
        self._round: OpenRound | None = None
        self._asked: list[Metadata] = []
        self._arrays = ArrayRecord()
        found = self._curator.resumed
        self._latest = None if found is None else record_from(found.arrays)

    @classmethod
    def from_config(cls, run_config: Mapping[str, Any], **more: Any) -> Self:
        """From the flat keys of a Flower run config (see ``Settings``); ``more`` are arguments as of ``PPSGD``."""
        settings = Settings.from_run_config(run_config)
        return cls(**{**settings.arguments(), "replies": settings.replies, **more})

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

    @property
    def metrics_share(self) -> float:
        """ρ, the share of the squared clip norm that private measures take; 0 without any."""
        return self._curator.metrics.share if self._curator.metrics else 0.0

    @property
    def enrols_whoever_comes(self) -> bool:
        """Whether the population is the first nodes seen, rather than a list that was given."""
        return self._enrolment.open

    def privacy_statement(self) -> str:
        """The guarantee in words."""
        return statement.in_words(self._curator)

    def privacy_data(self) -> dict[str, object]:
        """The guarantee as data, ready for JSON."""
        size = self._layout(self._arrays).size if self._arrays else 0
        return statement.as_data(self._curator, size=size)

    def summary(self) -> None:
        """Log the settings that make up the promise."""
        log.info("\t├──> %s", self.release)
        log.info("\t└──> %s (alpha·Q = %g)", self.steps, self.steps.alpha_q)

    def start(  # noqa: PLR0917 - Flower's own signature
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        on_round: Callable[[int, Result], None] | None = None,
    ) -> Result:
        """Train for ``num_rounds`` rounds, or as many as the budget pays for.

        ``num_rounds`` is the total: one strategy is one training, and a second call, or one that finds a training in
        ``checkpoint_dir``, goes on from where it was, whatever ``initial_arrays`` holds. ``evaluate_fn`` is called
        with the absolute round and w, ``on_round`` with the round and the result so far; both before the first round
        and after each. ``timeout`` is that of a round in seconds, ``round_timeout`` unless given.
        """
        timeout = self.round_timeout if timeout is None else timeout
        rounds = self._last_round = self._curator.plan(num_rounds)
        first = self._curator.rounds_done
        if 0 < num_rounds <= first:
            log.warning("All %d rounds are done already: num_rounds is the total, give more to go on", first)
        log.info("Starting PPSGD for %d rounds:", rounds)
        self.summary()
        result = Result(arrays=self._beginning(initial_arrays))
        for round_ in range(first, max(first, rounds) + 1):
            if round_ > first:
                self._run_round(round_, result, grid, timeout, train_config or ConfigRecord())
            self._run_evaluation(round_, result, grid, timeout, evaluate_config or ConfigRecord())
            central = evaluate_fn(round_, result.arrays) if evaluate_fn else None
            if central is not None:
                result.evaluate_metrics_serverapp[round_] = central
            if on_round:
                on_round(round_, result)
        log.info("%s", self.privacy_statement())
        result.arrays = self.averaged(result.arrays)
        return result

    def _run_round(self, round_: int, result: Result, grid: Grid, timeout: float, config: ConfigRecord) -> None:
        messages = self.configure_train(round_, result.arrays, config, grid)
        replies = ask(grid, messages, timeout)
        result.arrays, metrics = self.aggregate_train(round_, replies)
        result.train_metrics_clientapp[round_] = metrics
        log.info("[ROUND %d/%d] epsilon so far at most %.4g", round_, self._last_round, metrics["epsilon"])

    def _run_evaluation(self, round_: int, result: Result, grid: Grid, timeout: float, config: ConfigRecord) -> None:
        messages = list(self.configure_evaluate(round_, result.arrays, config, grid))
        if not messages:
            return
        metrics = self.aggregate_evaluate(round_, ask(grid, messages, timeout))
        if metrics is not None:
            result.evaluate_metrics_clientapp[round_] = metrics

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Budget, then the cohort from the enrolled population, then w and an Order to each of its members online."""
        self._curator.check_budget(server_round)
        online = self._online(grid)
        drawn = self._enrolment.nodes(self._curator.draw(server_round))
        layout = self._layout(arrays)
        content = self._content(server_round, arrays, config)
        messages = [Message(content, online[node], MessageType.TRAIN) for node in drawn if node in online]
        self._arrays = arrays
        self._asked = [message.metadata for message in messages]  # a grid fills in the ids when it sends them
        nodes = [metadata.dst_node_id for metadata in self._asked]
        self._round = OpenRound(self._curator, server_round, layout.flatten(arrays), nodes)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """One noisy step; each reply is a vector or zero."""
        opened = self._round
        if opened is None:
            raise not_configured(server_round)
        layout = self._layout(self._arrays)
        read = self._reader(layout)
        by_message = {metadata.message_id: metadata.dst_node_id for metadata in self._asked if metadata.message_id}
        for reply in getattr(replies, "once", replies.__iter__)():  # InProcessGrid forgets each reply once it is read
            opened.take(_answered_node(reply, by_message), lambda reply=reply: read(reply))  # type: ignore[misc]
        w, measures = opened.close(server_round)
        arrays = layout.unflatten(w, like=self._arrays) if self.steps.publishes else self._arrays
        self._curator.save({name: array.data for name, array in arrays.items()})
        self._latest = arrays
        released = {"epsilon": self._curator.epsilon_so_far(), **measures}
        self._scalars.add(server_round, released)
        return arrays, MetricRecord({**released})

    @property
    def rounds_done(self) -> int:
        """The last round that was published, restarts included."""
        return self._curator.rounds_done

    def close(self) -> None:
        """Give up the lock on ``checkpoint_dir``, so that another strategy of this process can go on there."""
        self._curator.close()

    def _beginning(self, initial: ArrayRecord) -> ArrayRecord:
        """The w to go on from: that of the last round where there was one, if it has the form of ``initial``."""
        if self._latest is None:
            return initial
        if self._layout(self._latest) != self._layout(initial):
            raise ValueError(
                f"the training so far has the arrays {list(self._latest)} and initial_arrays has {list(initial)}, or "
                "other shapes: continue with the same model, or start anew in another checkpoint_dir"
            )
        return self._latest

    def averaged(self, arrays: ArrayRecord) -> ArrayRecord:
        """The average iterate, where ``average`` is on; ``arrays`` otherwise."""
        if not self._curator.average:
            return arrays
        layout = self._layout(arrays)
        return layout.unflatten(self._curator.averaged(layout.flatten(arrays)), like=arrays)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every enrolled node online, in every so many rounds and in the last; round 0 is before training."""
        due = self.evaluate_every and (server_round % self.evaluate_every == 0 or server_round == self._last_round)
        if not due:
            return []
        self._curator.note_evaluation()
        online = self._online(grid)
        content = self._content(server_round, self.averaged(arrays), config)
        known = self._enrolment.known
        return [Message(content, online[node], MessageType.EVALUATE) for node in known if node in online]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean over users, weighted by their number of examples. Outside the guarantee."""
        log.debug("Round %d: metrics from client data are outside the guarantee", server_round)
        answered = list(replies)
        failed = [reply for reply in answered if reply.has_error()]
        if failed:
            log.warning(
                "Round %d (server-private): %d of %d evaluations failed; the first: %s",
                server_round, len(failed), len(answered), " ".join(str(failed[0].error.reason).split())[:300],
            )  # fmt: skip
        return weighted_mean(reply.content for reply in answered if reply.has_content())

    def _online(self, grid: Grid) -> dict[Identity, int]:
        found = self._enrolment.refresh(lambda: present_in(grid))
        self._curator.caveat = self._enrolment.caveat
        return cast(dict[Identity, int], found)

    def _content(self, round_: int, arrays: ArrayRecord, config: ConfigRecord) -> RecordDict:
        """What a client gets. One that returns parameters gets what Flower's stock strategies send."""
        if self.replies == "parameters":
            return RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, "server-round": round_})})
        order = order_for(self._curator, round_)
        return RecordDict({ARRAYS: arrays, CONFIG: config, ORDER: ConfigRecord(order.to_flat())})

    def _layout(self, arrays: ArrayRecord) -> Layout:
        return Layout.of(arrays, is_buffer) if self.replies == "parameters" else Layout.of(arrays)

    def _reader(self, layout: Layout) -> Callable[[Message], Vector]:
        """From a reply to the vector that is clipped and summed."""
        if not self.steps.publishes:
            return _nothing
        if self.replies == "gradient":
            measures = self._curator.metrics
            return lambda reply: _with_measures(
                _vector(reply, GRADIENT, layout), reply, measures, self.release.clip_norm
            )
        w = layout.flatten(self._arrays)
        return lambda reply: w - _vector(reply, ARRAYS, layout)


def is_buffer(name: str, dtype: np.dtype[Any]) -> bool:
    """Whether an array of a state_dict is a counter or a running statistic, rather than a parameter."""
    return dtype.kind != "f" or any(fnmatch.fnmatchcase(name, pattern) for pattern in STATISTICS)


def _nothing(reply: Message) -> Vector:
    """At α = 0 a client has nothing to say; it may still fail."""
    _check_error(reply)
    return np.zeros(0)


def _vector(reply: Message, name: str, layout: Layout) -> Vector:
    """The named record of a reply, and nothing else of it."""
    _check_error(reply)
    record = reply.content.get(name)
    if not isinstance(record, ArrayRecord):
        hint = (
            " (a client that returns parameters needs PPSGD(replies='parameters'))" if ARRAYS in reply.content else ""
        )
        raise UnusableError(f"without {name}", f"no ArrayRecord {name!r} among {sorted(reply.content)}{hint}")
    try:
        return layout.flatten(record)
    except ValueError as error:
        raise UnusableError("of wrong keys, shape or dtype", str(error)) from None


def _with_measures(g: Vector, reply: Message, metrics: PrivateMetrics | None, clip_norm: float) -> Vector:
    """The gradient, followed by the measures in their units, scaled so that one unit is C·√ρ."""
    if metrics is None:
        return g
    record = reply.content.get(METRICS)
    given = _finite(record) if isinstance(record, MetricRecord) else {}
    scale = clip_norm * math.sqrt(metrics.share)
    return np.append(g, [scale * given.get(name, 0.0) / unit for name, unit in metrics.units.items()])


def _check_error(reply: Message) -> None:
    if reply.has_error():
        raise UnusableError("client error", f"error {reply.error.code}: {reply.error.reason}")


def _answered_node(reply: Message, by_message: dict[str, int]) -> int | None:
    """The asked node that a reply answers for: by the message it replies to where there is one, else by its source.

    What one node says in another's name counts for nobody. Errors may come from Flower itself, as node 1.
    """
    answered, source = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
    if not (answered and by_message):
        return source
    asked = by_message.get(answered)
    return asked if asked == source or reply.has_error() else None


def weighted_mean(contents: Iterable[RecordDict]) -> MetricRecord | None:
    """Σ n_i·m_i / Σ n_i for each metric, over the replies in which it is a finite number; None where there are none."""
    records = (content.get(METRICS) for content in contents)
    return mean_of(_finite(record) for record in records if isinstance(record, MetricRecord))


def mean_of(measures: Iterable[dict[str, float]]) -> MetricRecord | None:
    """The means, each user weighted by ``num-examples``."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for numbers in measures:
        weight = max(0.0, numbers.pop(NUM_EXAMPLES, 1.0))
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    means = {name: total / weights[name] for name, total in sums.items() if weights[name] > 0}
    return MetricRecord({**means}) if means else None


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
