"""What is in a client's reply, under the Message API: a vector, measures, or a failure."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_ppsgd.arrays import Layout, decode, header_of, vector_record
from flwr_ppsgd.secure.coordinator import SecureStage
from flwr_ppsgd.server.rounds import Sent, UnusableError
from flwr_ppsgd.wire import (
    ANSWER,
    ARRAYS,
    CONFIG,
    DATA,
    MASKED,
    METRICS,
    NUM_EXAMPLES,
    SECURE,
    SERVER_ROUND,
)

ClientTask: TypeAlias = Literal["fit", "evaluate"]

OK = 0  # Flower's status of a reply that is no failure
SCALARS = (bool, bytes, float, int, str)
LONGEST_NAME = 64  # characters of a measure that a client names
MOST_MEASURES = 50  # that are averaged over clients
LARGEST_MEASURE = 1e100
LARGEST_WEIGHT = 10.0  # of one client, in medians of all clients'
ROOT = "rmse"  # measures whose name ends so are roots of mean squares
OURS = ("round", "epsilon", "deployed_epsilon")  # names that no client's measure may have


def answered_node(reply: Message, asked: Mapping[str, int]) -> int | None:
    """The asked node that a reply answers for.

    By the message it replies to, if it names one, else by its source. What one node says in
    another's name counts for nobody. Errors may come from Flower itself, as node 1.

    Args:
        reply: the reply.
        asked: the node that each message was sent to, by the message's id.
    """
    metadata = reply.metadata
    answered = metadata.reply_to_message_id
    source = metadata.src_node_id
    if not (answered and asked):
        return source
    node = asked.get(answered)
    return node if node == source or reply.has_error() else None


def vector_in(content: Mapping[str, Any], name: str, layout: Layout) -> NDArray[Any]:
    """The arrays of a record as one vector; UnusableError if they are not of that layout."""
    arrays = content.get(name)
    if not isinstance(arrays, ArrayRecord):
        hint = ""
        if ARRAYS in content:
            hint = " (a client that returns parameters needs PPSGD(replies='parameters'))"
        detail = f"no ArrayRecord {name!r} among {sorted(content)}{hint}"
        raise UnusableError(f"without {name}", detail)
    try:
        return layout.flatten(arrays, as_sent=True)
    except ValueError as error:
        raise UnusableError("of wrong keys, shape or dtype", str(error)) from None


def answer_layout(length: int) -> Layout:
    """Of what is sent before the first round: one array."""
    return Layout.of(vector_record({ANSWER: np.zeros(length)}))


def secure_message_in(content: Mapping[str, Any], stage: int, size: int) -> Sent:
    """A client's part of one exchange of a secure sum."""
    if stage == SecureStage.MASKED:
        return _masked_vector(content.get(MASKED), size)
    record = content.get(SECURE)
    payload = record.get(DATA) if isinstance(record, ConfigRecord) else None
    return payload if isinstance(payload, bytes) else b""


def _masked_vector(record: object, size: int) -> NDArray[np.uint64]:
    """The words of a masked vector; ValueError unless there are as many."""
    if not isinstance(record, ArrayRecord) or set(record) != {MASKED}:
        raise ValueError(f"no masked vector alone in a record {MASKED!r}")
    header = header_of(record[MASKED], MASKED)
    if header.dtype != np.dtype("<u8") or header.shape != (size,):
        raise ValueError(f"a masked vector of {header.dtype}{header.shape}, expected {size} words")
    return decode(record[MASKED], MASKED)


def finite_measures(measures: object) -> dict[str, float]:
    """Those of a client's measures that are finite numbers."""
    if not isinstance(measures, Mapping):
        return {}
    return {
        name: float(value)
        for name, value in measures.items()
        if isinstance(value, int | float) and abs(value) <= LARGEST_MEASURE
    }


def mean_of(measures: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Σ n_i·m_i / Σ n_i of each measure, over the users in whose reply it is a finite number; for
    measures called …rmse the root of the mean square, which is that of all rows together.

    n_i is the measure ``num-examples``, or 1 if it is missing; it counts up to ten times the
    median, so that no client can make itself the mean. Names that are ours, or that no terminal
    should see, are left out.
    """
    numbers = [finite_measures(own) for own in measures]
    weights = [max(0.0, own.pop(NUM_EXAMPLES, 1.0)) for own in numbers]
    if not weights:
        return {}
    largest = LARGEST_WEIGHT * statistics.median(weights)
    sums: dict[str, float] = {}
    totals: dict[str, float] = {}
    for own, given in zip(numbers, weights, strict=True):
        weight = min(given, largest)
        for name, value in own.items():
            printable = 0 < len(name) <= LONGEST_NAME and name.isprintable()
            if not printable or name in OURS:
                continue
            if name not in sums and len(sums) >= MOST_MEASURES:
                continue
            summed = value**2 if name.endswith(ROOT) else value
            sums[name] = sums.get(name, 0.0) + weight * summed
            totals[name] = totals.get(name, 0.0) + weight
    means = {}
    for name, total in totals.items():
        if total > 0:
            mean = sums[name] / total
            means[name] = math.sqrt(mean) if name.endswith(ROOT) else mean
    return means


# --- clients that return parameters, NumPyClients among them


def content_in_both_forms(
    task: ClientTask, arrays: ArrayRecord, config: ConfigRecord, round_: int
) -> RecordDict:
    """What a client that returns parameters is sent.

    A NumPyClient reads ``fitins.parameters`` where other clients read ``arrays``, and its arrays
    have numbers in place of names. Nobody tells which kind a client is, so a message holds both
    forms; Flower transfers equal arrays once.

    Args:
        task: of the client.
        arrays: w, and what travels along.
        config: the user's own.
        round_: the absolute round.
    """
    scalars = {name: value for name, value in config.items() if isinstance(value, SCALARS)}
    numbered: dict[str, Array] = {str(place): each for place, each in enumerate(arrays.values())}
    return RecordDict(
        {
            ARRAYS: arrays,
            CONFIG: ConfigRecord({**config, "server-round": round_}),
            f"{task}ins.parameters": ArrayRecord(numbered),
            f"{task}ins.config": ConfigRecord({**scalars, SERVER_ROUND: round_}),
        }
    )


def with_named_arrays(content: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The content of a reply, with the arrays of a NumPyClient under the names of w.

    Args:
        content: of a reply with trained parameters.
        names: of the arrays that were sent.
    """
    status = content.get("fitres.status")
    if isinstance(status, ConfigRecord) and status.get("code") != OK:
        detail = str(status.get("message") or "a status that is not OK")
        raise UnusableError("client error", detail)
    arrays = content.get("fitres.parameters")
    if ARRAYS in content or not isinstance(arrays, ArrayRecord):
        return content
    names = list(names)
    if len(arrays) == len(names):
        arrays = ArrayRecord(dict(zip(names, arrays.values(), strict=True)))
    return {ARRAYS: arrays}


def measures_in(content: RecordDict) -> Mapping[str, Any] | None:
    """The measures in the reply of any client to an evaluation; None if there are none."""
    plain = content.get(METRICS)
    if isinstance(plain, MetricRecord):
        return plain
    loss = content.get("evaluateres.loss")
    examples = content.get("evaluateres.num_examples")
    if not isinstance(loss, MetricRecord) or not isinstance(examples, MetricRecord):
        return None
    more = content.get("evaluateres.metrics", ConfigRecord())
    counted = {NUM_EXAMPLES: examples.get("num_examples", 1)}
    return {**more, **loss, **counted}
