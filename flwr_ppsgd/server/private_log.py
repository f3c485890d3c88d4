"""What only the server's operator may see: how many replied, why others did not, what went wrong.

Sampling protects users only as long as nobody knows who took part. So these facts are not in
Flower's log, which ``flwr log`` shows to whoever may submit runs: they go to a file for its owner
alone (mode 0600) beside the checkpoints, one JSON line each. ``ppsgd status`` reads it.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_ppsgd import disk
from flwr_ppsgd.checks import printable

log = logging.getLogger("flwr.ppsgd")

NAME = "server-private.jsonl"
LONGEST_TEXT = 1000  # characters of an error that are kept


@dataclass(frozen=True)
class RoundFacts:
    """What came back in one round.

    Args:
        round: the absolute round.
        used: the number of replies that were summed.
        zeros: how many counted as zero, by reason.
        first_failure: what the first of them said; empty if none did.
    """

    round: int
    used: int
    zeros: Mapping[str, int] = field(default_factory=dict)
    first_failure: str = ""

    def in_words(self) -> str:
        """One line, with names for a program that reads it."""
        reasons = "".join(f" {name.replace(' ', '-')}={n}" for name, n in self.zeros.items())
        line = f"round={self.round} replies={self.used} zeros={sum(self.zeros.values())}{reasons}"
        return f"{line}; the first: {self.first_failure}" if self.first_failure else line


class PrivateLog:
    """Where server-private facts go.

    Args:
        directory: the checkpoint directory. Without one, facts are in Flower's log at level DEBUG,
            which is off unless the operator turns it on.
        secret: whether who takes part is a secret. It is none if coins come from a known seed:
            then, without a directory, facts are in Flower's log as any other line.
    """

    def __init__(self, directory: Path | None, secret: bool) -> None:
        self.path = None if directory is None else directory / NAME
        self._secret = secret
        self._warned = False

    @property
    def where(self) -> str:
        """For whoever looks for them in the log, where these facts are."""
        if self.path is not None:
            return f"`ppsgd status {self.path.parent}` shows clients' replies and errors"
        return "clients' replies and errors are shown by `ppsgd status`, if checkpoint_dir is set"

    def note_round(self, facts: RoundFacts) -> None:
        """What came back in a round."""
        nobody = bool(facts.zeros) and not facts.used
        level = logging.WARNING if nobody else logging.INFO
        self._note(vars(facts), facts.in_words(), level)

    def note_problem(self, text: object) -> None:
        """What needs the operator and did not end the run."""
        words = printable(text, LONGEST_TEXT)
        self._note({"problem": words}, words, logging.WARNING)

    def note_error(self, error: BaseException) -> None:
        """What ended the run; whoever raised it shows it too."""
        words = printable(f"{type(error).__name__}: {error}", LONGEST_TEXT)
        self._note({"error": words}, words, logging.DEBUG)

    def note_refusal(self, error: BaseException) -> None:
        """Why a run did not even begin; nothing is written where no training has been."""
        if self.path is not None and self.path.exists():
            self.note_error(error)

    def _note(self, entry: Mapping[str, Any], words: str, level: int) -> None:
        if self.path is None:
            shown = logging.DEBUG if self._secret else level
            log.log(shown, "server-private: %s", words)
            return
        stamped = {"time": round(time.time(), 3), **entry}
        try:
            _append(self.path, json.dumps(stamped, ensure_ascii=False).encode())
        except OSError as error:  # no reason to stop a round that is charged
            if not self._warned:
                log.warning("%s cannot be written: %s", self.path, error.strerror or error)
            self._warned = True


def _append(path: Path, line: bytes) -> None:
    """Add a line, after whatever a crash has left of the one before.

    Not synced: what is lost with the power is of no account to anybody's privacy.
    """
    torn = path.exists() and not disk.ends_whole(path)
    before = b"\n" if torn else b""
    disk.append(path, before + line + b"\n", mode=disk.PRIVATE_FILE, sync=False)


def entries(directory: Path) -> Iterator[dict[str, Any]]:
    """Everything that was noted, oldest first; lines that a crash has torn are left out."""
    path = directory / NAME
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry
