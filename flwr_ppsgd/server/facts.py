"""What only the server's operator may see: how many replied, what failed, what ended a run.

Sampling protects users only as long as nobody knows who took part. So facts are in the store, for
``ppsgd status``, and not in Flower's log, which ``flwr log`` shows to everyone who may submit runs.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr_ppsgd.checks import printable
from flwr_ppsgd.server.store import Store
from flwr_ppsgd.training import Training

log = logging.getLogger("flwr.ppsgd")

LONGEST_ERROR = 1000  # characters of an error that are kept


class OperatorFacts:
    """Notes for the operator of one training.

    Args:
        store: where they are kept, if it is on disk.
        training: says whether noise comes from a known seed: then there is no secret, and what is
            not kept is logged.
    """

    def __init__(self, store: Store, training: Training) -> None:
        self._store = store
        self._has_secrets = training.insecure_seed is None

    def where(self) -> str:
        """For people who look for clients' replies and errors in the log."""
        directory = self._store.directory
        if directory is not None:
            return f"`ppsgd status {directory}` shows clients' replies and errors"
        return "clients' replies and errors are shown by `ppsgd status`, if checkpoint_dir is set"

    def note_replies(self, counts: Mapping[str, Any]) -> None:
        """What came back for a sum: see ``OpenSum.facts``."""
        self._note(counts, logging.INFO)

    def note_problem(self, text: object) -> None:
        """What needs the operator and did not end the run."""
        self._note({"problem": printable(text, LONGEST_ERROR)}, logging.WARNING)

    def note_failed_evaluations(self, round_: int, failures: Sequence[str], others: int) -> None:
        """How many evaluations failed beside ``others`` that did not, and why the first."""
        if failures:
            self.note_problem(
                f"round {round_}: {len(failures)} of {len(failures) + others} evaluations failed; "
                f"the first: {failures[0]}"
            )

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Note what ends the run in this block; it is raised all the same."""
        try:
            yield
        except BaseException as error:
            words = printable(f"{type(error).__name__}: {error}", LONGEST_ERROR)
            self._note({"error": words}, logging.DEBUG)
            raise

    def _note(self, fact: Mapping[str, Any], level: int) -> None:
        if self._store.directory is not None:
            self._store.record_fact(fact)
            return
        words = fact.get("problem") or fact.get("error") or facts_in_words(fact)
        log.log(logging.DEBUG if self._has_secrets else level, "server-private: %s", words)


def facts_in_words(facts: Mapping[str, Any]) -> str:
    """One line, with names for a program that reads it."""
    line = f"round={facts['round']} {counts_in_words(facts['used'], facts['zeros'])}"
    failure = facts.get("first_failure")
    return f"{line}; the first: {failure}" if failure else line


def counts_in_words(used: int, zeros: Mapping[str, int]) -> str:
    """How many replies counted, and how many did not, by reason."""
    words = [f"replies={used}", f"zeros={sum(zeros.values())}"]
    for reason, times in zeros.items():
        name = reason.replace(" ", "-")
        words.append(f"{name}={times}")
    return " ".join(words)
