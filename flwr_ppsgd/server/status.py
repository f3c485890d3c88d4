"""What ``ppsgd status`` shows: how a training does, for a watch loop or a monitor.

Nothing is locked or changed, so it may be asked at any time, while the training runs. What it tells
about replies and errors is for the server's operator alone.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr_ppsgd import disk
from flwr_ppsgd.promise import Headline, json_number, rounded_up
from flwr_ppsgd.server import checkpoint, journal, private_log
from flwr_ppsgd.server.curator import headline_of
from flwr_ppsgd.server.journal import read_story
from flwr_ppsgd.server.private_log import RoundFacts
from flwr_ppsgd.server.record import Record

STATES = {
    True: "at work",
    False: "not at work, as far as this machine shows",
    None: "unknown whether it is at work",
}
UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Noted:
    """A text with the time at which it was noted, in seconds since 1970."""

    time: float
    text: str

    @property
    def at(self) -> str:
        """The time for people, in UTC."""
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@dataclass
class Heard:
    """What the server-private file tells, over all starts of the server.

    Args:
        rounds: the number of rounds it tells of.
        used: the number of replies that were summed.
        zeros: how many counted as zero, by reason.
        last: the last round.
        last_time: when that round was published, in seconds since 1970.
        error: what last ended a run.
        problem: what last needed the operator.
    """

    rounds: int = 0
    used: int = 0
    zeros: Counter[str] = field(default_factory=Counter)
    last: RoundFacts | None = None
    last_time: float = 0.0
    error: Noted | None = None
    problem: Noted | None = None

    def take(self, entry: Mapping[str, Any]) -> None:
        """Add a line; one that this version does not know is passed over."""
        match entry:
            case {"time": float(at), "round": int(round_), "used": int(used), "zeros": dict(zeros)}:
                self.rounds += 1
                self.used += used
                self.zeros.update(zeros)
                self.last = RoundFacts(round_, used, zeros, str(entry.get("first_failure", "")))
                self.last_time = at
            case {"time": float(at), "error": str(text)}:
                self.error = Noted(at, text)
            case {"time": float(at), "problem": str(text)}:
                self.problem = Noted(at, text)


@dataclass(frozen=True)
class Status:
    """How a training does.

    Args:
        directory: its checkpoint directory.
        training: its id.
        running: whether a process holds its lock; None if the system does not tell.
        rounds_done: the last round that was published.
        rounds_planned: the number of rounds that are planned.
        charges: the number of releases that were charged.
        missing: charges that w or the record outside shows and the journal does not.
        spent: what the charges cost.
        stated: what the planned rounds cost, if that is more.
        budget_dir: the budget that the training is under; empty if it is under none.
        heard: what came back from the clients, and what went wrong.
        used_bytes: what the directory holds.
        free_bytes: what the disk has left.
    """

    directory: Path
    training: int
    running: bool | None
    rounds_done: int
    rounds_planned: int
    charges: int
    missing: int
    spent: Headline
    stated: Headline
    budget_dir: str
    heard: Heard
    used_bytes: int
    free_bytes: int

    def as_data(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        heard = self.heard
        last = None
        if heard.last is not None:
            last = {
                "round": heard.last.round,
                "time": heard.last_time,
                "used": heard.last.used,
                "zeros": dict(heard.last.zeros),
                "first_failure": heard.last.first_failure,
            }
        return {
            "directory": str(self.directory),
            "training": self.training,
            "running": self.running,
            "rounds": {"done": self.rounds_done, "planned": self.rounds_planned},
            "charges": {"made": self.charges, "missing": self.missing},
            "epsilon": {
                "spent": json_number(self.spent.epsilon),
                "planned": json_number(self.stated.epsilon),
                "delta": self.spent.delta,
                "why_void": self.stated.why_void(),
                "budget_dir": self.budget_dir,
            },
            "replies": {"rounds": heard.rounds, "used": heard.used, "zeros": dict(heard.zeros)},
            "last_round": last,
            "last_error": _noted(heard.error),
            "last_problem": _noted(heard.problem),
            "disk": {"used_bytes": self.used_bytes, "free_bytes": self.free_bytes},
        }

    def in_words(self) -> str:
        """The same for people."""
        lines = [
            f"{self.directory} (for the server's operator alone)",
            f"training {self.training}: {STATES[self.running]}",
            f"rounds: {self.rounds_done} of {self.rounds_planned} done",
            *self._costs(),
            *self._replies(),
            f"last error: {_in_words(self.heard.error)}",
            f"last problem: {_in_words(self.heard.problem)}",
            f"disk: {_size(self.used_bytes)} used, {_size(self.free_bytes)} free",
        ]
        return "\n  ".join(lines)

    def _costs(self) -> list[str]:
        spent = rounded_up(self.spent.epsilon)
        stated = rounded_up(self.stated.epsilon)
        lines = [
            f"epsilon: {spent} spent, {stated} planned, at delta = {self.spent.delta:g} (zero-out)"
        ]
        if self.stated.void:
            lines.append(f"NO GUARANTEE: {self.stated.why_void()}")
        if self.budget_dir:
            lines.append(f"under the budget in {self.budget_dir}, whose epsilon is the guarantee")
        if self.missing:
            lines.append(
                f"{self.missing} charges are MISSING in the journal: see ppsgd ledger "
                f"{self.directory}"
            )
        return lines

    def _replies(self) -> list[str]:
        heard = self.heard
        if heard.last is None:
            return [f"replies: none are noted in {private_log.NAME}"]
        total = RoundFacts(heard.last.round, heard.used, heard.zeros)
        _, _, counts = total.in_words().partition(" ")
        at = Noted(heard.last_time, "").at
        return [
            f"replies in {heard.rounds} rounds: {counts}",
            f"last round: {heard.last.in_words()} ({at})",
        ]


def status_of(directory: Path) -> Status:
    """How the training in a checkpoint directory does.

    ValueError if there is none, or if its journal is damaged.
    """
    story = read_story(directory)
    saved = checkpoint.newest(directory)
    known = max(Record(story.training, directory).read() or 0, saved[1] if saved else 0)
    if known > story.ledger.rounds:  # perhaps written since
        story = read_story(directory)
    ledger = story.ledger
    ahead = max(0, story.planned - ledger.rounds)
    stated = ledger.record(story.kinds[journal.FIRST], ahead)
    heard = Heard()
    for entry in private_log.entries(directory):
        heard.take(entry)
    rounds = [heard.last.round if heard.last else 0, saved[0] if saved else 0]
    return Status(
        directory=directory,
        training=story.training,
        running=disk.is_locked(directory / journal.NAME),
        rounds_done=max(rounds),
        rounds_planned=story.planned_rounds,
        charges=ledger.rounds,
        missing=max(0, known - ledger.rounds),
        spent=headline_of(ledger),
        stated=headline_of(stated),
        budget_dir=story.budget_dir,
        heard=heard,
        used_bytes=sum(_sizes(directory)),
        free_bytes=shutil.disk_usage(directory).free,
    )


def _sizes(directory: Path) -> Iterable[int]:
    """The sizes of the files of a directory; old checkpoints may vanish meanwhile."""
    for path in directory.iterdir():
        try:
            yield path.stat().st_size
        except FileNotFoundError:
            continue


def _noted(noted: Noted | None) -> dict[str, Any] | None:
    return None if noted is None else {"time": noted.time, "text": noted.text}


def _in_words(noted: Noted | None) -> str:
    return "none" if noted is None else f"{noted.text} ({noted.at})"


def _size(size: float) -> str:
    """A number of bytes for people."""
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"
