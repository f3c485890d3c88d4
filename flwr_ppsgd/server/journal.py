"""The ledger on disk: append-only, synced before anything is released, never rolled back.

One line for the settings, then one for each start of the server, each release, each longer plan and
for evaluation. Every line ends in a checksum over itself and the line before, so that a line
changed, moved or lost inside the file shows. A damaged journal is refused, never repaired: what it
can no longer tell may have been released.
"""

import json
import logging
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr_ppsgd import disk
from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.privacy import Ledger, release_from_dict, release_to_dict

log = logging.getLogger("flwr.ppsgd")

NAME = "journal.jsonl"
PATIENCE = 60.0  # seconds to wait for the lock
POLL_SECONDS = 0.5
FORMAT = "flwr_ppsgd journal 2"


class Journal:
    """The charges of one training.

    Opening it takes the lock, which the process keeps until it ends or calls ``close``.

    Args:
        directory: where the journal is, or will be.
        release: what the training publishes in a round.
        delta: δ at which ε is stated.
    """

    def __init__(self, directory: Path, release: Release, delta: float) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.planned = 0
        self.evaluated = False
        self.starts: list[int] = []  # the first round of each start of the server
        self.training = secrets.randbits(62)  # names this training to its clients
        self._check = 0
        self._path = directory / NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._file = os.open(self._path, flags, disk.PRIVATE_FILE)
        try:
            self._lock()
            self.ledger = self._load(release, delta)
        except BaseException:
            self.close()
            raise

    def plan(self, charges: int) -> None:
        """Write down how many charges are planned in all, if that is more than before."""
        if charges > self.planned:
            self._append({"planned": charges})
            self.planned = charges

    def begin(self, round_: int) -> None:
        """Write down that a server starts with this round.

        What clients did in this round or later counts for nothing.
        """
        self._append({"begins": round_})
        self.starts.append(round_)

    def note_evaluation(self) -> None:
        """Write down that there is evaluation on client data."""
        self._append({"evaluation": True})

    def charge(self, round_: int, insecure: bool) -> None:
        """Write one release down.

        When this returns, it is on the disk; only then may anything be released.
        """
        self._append({"round": round_, "insecure": insecure})

    def close(self) -> None:
        """Give up the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lock(self) -> None:
        """A ServerApp outlives its SuperLink by some seconds: wait for it to let go."""
        deadline = time.monotonic() + PATIENCE
        told = False
        while not disk.try_lock(self._file):
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{self._path} is in use by another training: two of them would spend one "
                    "budget twice; wait for it to end, or choose another checkpoint_dir"
                )
            if not told:
                log.info(
                    "Waiting up to %g s for another training to let go of %s", PATIENCE, self._path
                )
            told = True
            time.sleep(POLL_SECONDS)

    def _append(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry, allow_nan=False)
        self._check = zlib.crc32(text.encode(), self._check)
        line = f"{text}\t{self._check:08x}\n".encode()
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(
                    f"{self._path}: the disk took only part of a line; nothing was released"
                )
            os.fsync(self._file)
        except OSError:
            # what is on the disk is unknown now: nothing more may be released on its word
            self.close()
            raise

    def _load(self, release: Release, delta: float) -> Ledger:
        """The ledger that the lines tell; a new journal gets its first line."""
        settings = {
            "format": FORMAT,
            "training": self.training,
            "delta": delta,
            "release": release_to_dict(release),
        }
        lines = list(self._lines())
        if not lines:
            self._append(settings)
            disk.sync_directory(self.directory)
            return Ledger(delta)
        self._compare(lines[0], settings)
        self.training = int(lines[0]["training"])
        ledger = Ledger(delta)
        for entry in lines[1:]:
            ledger = self._replay(entry, ledger, release)
        return ledger

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The entries, each checked against its own sum and the one before."""
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            raise self._damaged(content.count(b"\n") + 1)
        for number, line in enumerate(content.splitlines(), start=1):
            text, _, check = line.rpartition(b"\t")
            self._check = zlib.crc32(text, self._check)
            if check != f"{self._check:08x}".encode():
                raise self._damaged(number)
            yield json.loads(text)

    def _replay(self, entry: dict[str, Any], ledger: Ledger, release: Release) -> Ledger:
        if "planned" in entry:
            self.planned = max(self.planned, int(entry["planned"]))
        elif "evaluation" in entry:
            self.evaluated = True
        elif "begins" in entry:
            self.starts.append(int(entry["begins"]))
        else:
            return ledger.record(release, insecure=bool(entry["insecure"]))
        return ledger

    def _compare(self, kept: dict[str, Any], settings: dict[str, Any]) -> None:
        """Refuse to continue under other privacy settings, naming each that differs."""
        found = kept.get("format")
        if found != FORMAT:
            raise ValueError(f"{self._path} is of format {found!r}, this version reads {FORMAT!r}")
        before = {"delta": kept["delta"], **kept["release"]}
        now = {"delta": settings["delta"], **settings["release"]}
        changed = [
            f"{key} was {before.get(key)} and is {value}"
            for key, value in now.items()
            if before.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"{self._path} belongs to a training with other privacy settings "
                f"({'; '.join(changed)}): continue with the old ones, or start anew in another "
                "checkpoint_dir"
            )
        release_from_dict(kept["release"])

    def _damaged(self, line: int) -> ValueError:
        return ValueError(
            f"{self._path} is damaged at line {line}: what was released can no longer be told, so "
            "the training is not continued; restore the file from a backup, or start anew in "
            "another checkpoint_dir"
        )
