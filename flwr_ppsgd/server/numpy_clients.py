"""NumPyClient apps under the Message API: which records they get, and what they send back.

A NumPyClient reads ``fitins.parameters`` where other clients read ``arrays``, and its arrays have
numbers in place of names.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_ppsgd.wire import ARRAYS, CONFIG, METRICS, NUM_EXAMPLES

Task: TypeAlias = Literal["fit", "evaluate"]
Kind: TypeAlias = Literal["numpy", "other"]

OK = 0  # Flower's status of a reply that is no failure
SCALARS = (bool, bytes, float, int, str)


class Addressing:
    """What clients that return parameters are sent.

    Until all who answer are of one kind, and nobody fails, a message holds the records of both
    kinds; Flower transfers equal arrays once.
    """

    def __init__(self) -> None:
        self._kinds: set[Kind] = {"numpy", "other"}
        self._heard: set[Kind] = set()  # since the last message

    def content(
        self, task: Task, arrays: ArrayRecord, config: ConfigRecord, round_: int
    ) -> RecordDict:
        """The content of a message.

        Args:
            task: of the client.
            arrays: w, and what travels along.
            config: the user's own.
            round_: the absolute round.
        """
        if self._heard:
            self._kinds = self._heard
            self._heard = set()
        content = RecordDict()
        if "other" in self._kinds:
            content[ARRAYS] = arrays
            content[CONFIG] = ConfigRecord({**config, "server-round": round_})
        if "numpy" in self._kinds:
            scalars = {name: value for name, value in config.items() if isinstance(value, SCALARS)}
            content[f"{task}ins.parameters"] = _numbered(arrays)
            content[f"{task}ins.config"] = ConfigRecord({**scalars, "server_round": round_})
        return content

    def hear(self, reply: Message) -> None:
        """Take note of who answers: an error says nothing about its sender."""
        if reply.has_error():
            self._heard |= {"numpy", "other"}
        elif any("res." in name for name in reply.content):
            self._heard.add("numpy")
        else:
            self._heard.add("other")


def trained(content: RecordDict, like: ArrayRecord) -> ArrayRecord | None:
    """The arrays of a NumPyClient under the names of ``like``; None if it sent none."""
    arrays = content.get("fitres.parameters")
    if not isinstance(arrays, ArrayRecord) or failure(content):
        return None
    if len(arrays) != len(like):
        return arrays  # numbers that fit no name
    return ArrayRecord(dict(zip(like, arrays.values(), strict=True)))


def failure(content: RecordDict) -> str:
    """What a NumPyClient says of its own failing; empty if it has not failed."""
    status = content.get("fitres.status")
    if not isinstance(status, ConfigRecord) or status.get("code") == OK:
        return ""
    return str(status.get("message") or "a status that is not OK")


def measured(content: RecordDict) -> Mapping[str, Any] | None:
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


def _numbered(arrays: ArrayRecord) -> ArrayRecord:
    """The same arrays under the names 0, 1, 2, …"""
    numbered: dict[str, Array] = {str(place): array for place, array in enumerate(arrays.values())}
    return ArrayRecord(numbered)
