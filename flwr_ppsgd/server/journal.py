"""The ledger on disk: append-only, synced before anything is released, never rolled back.

One line for the settings, then one for each start of the server, each release, each longer plan,
each caveat and for evaluation. A damaged journal is refused, never repaired: what it can no longer
tell may have been released. A torn last line counts as one charge. A record outside the directory
shows if the journal went back in time.
"""

import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_ppsgd import disk
from flwr_ppsgd.algorithm import Release
from flwr_ppsgd.privacy import Ledger, release_from_dict, release_to_dict
from flwr_ppsgd.server import checkpoint, record
from flwr_ppsgd.server.chain import Chain, DamagedError, Told, load_charge, read_only
from flwr_ppsgd.server.record import Record

log = logging.getLogger("flwr.ppsgd")

NAME = "journal.jsonl"
PATIENCE = 60.0  # seconds to wait for the lock
FORMAT = "flwr_ppsgd journal 3"
FIRST = 0  # the kind of release of which the first line tells
TRAINING = re.compile(rb'"training": (\d+),')
NO_RECORD = (
    "the record of charges outside the checkpoint directory was missing when the training went on, "
    "so charges that the journal may have lost before would not have shown"
)
RECORD_NOT_WRITTEN = (
    "the record of charges outside the checkpoint directory could not be written, so a journal "
    "that goes back in time would not show"
)


@dataclass
class Story:
    """What the lines of a journal tell.

    Args:
        training: names this training to its clients.
        delta: δ at which ε is stated.
        kinds: the releases that charges may be of, by number.
        charges: how often each kind was charged, and whether with coins from a known seed.
        torn: the number of torn lines, each of which counts as one charge of the dearest kind.
        added: charges that were added by hand with their reasons; of the dearest kind too.
        sums: what was released before the first round, by what it asked for.
        planned: the largest number of charges that was planned.
        planned_rounds: the largest number of rounds that was planned.
        starts: the first round of each start of the server.
        evaluated: whether there was evaluation on client data.
        caveats: what the statement must say, and the unit that is protected if it is not the user.
        budget: the id of the budget that the training is under; None if it is under none.
        budget_dir: where that budget is.
    """

    training: int
    delta: float
    kinds: dict[int, Release]
    charges: Counter[tuple[int, bool]] = field(default_factory=Counter)
    torn: int = 0
    added: list[tuple[int, str]] = field(default_factory=list)
    planned: int = 0
    planned_rounds: int = 0
    starts: list[int] = field(default_factory=list)
    evaluated: bool = False
    caveats: dict[str, str] = field(default_factory=dict)
    budget: int | None = None
    budget_dir: str = ""
    sums: dict[str, list[float]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[Release, int]:
        """How often each release was charged, in all.

        Of a charge that cannot be read, or was added by hand, the kind is not known: it counts as
        each that might be the dearest.
        """
        counts: Counter[Release] = Counter()
        unknown = self.torn + sum(times for times, _ in self.added)
        for release in _dearest(self.kinds.values()):
            counts[release] += unknown
        for (kind, _), times in self.charges.items():
            counts[self.kinds[kind]] += times
        return {release: times for release, times in counts.items() if times}

    @property
    def ledger(self) -> Ledger:
        """The charges, counted by kind: their order does not matter for ε."""
        insecure = sum(times for (_, seeded), times in self.charges.items() if seeded)
        ledger = Ledger(self.delta, insecure_rounds=insecure)
        for release, times in self.counts.items():
            ledger = ledger.record(release, times)
        return ledger

    def take(self, entry: Mapping[str, Any]) -> None:
        """Add what a line tells that is neither the first nor a charge."""
        match entry:
            case {"planned": charges, "rounds": rounds}:
                self.planned = max(self.planned, int(charges))
                self.planned_rounds = max(self.planned_rounds, int(rounds))
            case {"begins": round_}:
                self.starts.append(int(round_))
            case {"evaluation": _}:
                self.evaluated = True
            case {"caveat": text}:
                self.caveats[text] = entry.get("unit", "user")
            case {"kind": kind, "release": data}:
                self.kinds[int(kind)] = release_from_dict(data)
            case {"added": times, "reason": reason}:
                self.added.append((int(times), reason))
            case {"sum": name, "numbers": numbers}:
                self.sums[str(name)] = [float(number) for number in numbers]
            case {"budget": budget, "directory": directory}:
                self.budget = int(budget)
                self.budget_dir = directory
            case _:
                raise ValueError(f"a line with {', '.join(entry)} is unknown to this version")

    def take_charge(self, kind: int, insecure: bool, times: int = 1) -> None:
        """Count a charge."""
        if kind not in self.kinds:
            raise ValueError(f"release kind {kind} is charged and not defined")
        self.charges[kind, insecure] += times


def _dearest(kinds: Iterable[Release]) -> list[Release]:
    """Those releases that no other one is sure to cost at least as much as."""
    found = list(dict.fromkeys(kinds))
    return [
        release
        for release in found
        if not any(_costs_at_least(other, release) for other in found if other is not release)
    ]


def _costs_at_least(one: Release, other: Release) -> bool:
    """Whether a release has no more noise and no more sampling than another.

    Of two that cost the same, one is taken for the dearer.
    """
    price = (one.noise_multiplier, -_amplifying_rate(one))
    reference = (other.noise_multiplier, -_amplifying_rate(other))
    if price == reference:
        return repr(one) < repr(other)
    return price[0] <= reference[0] and price[1] <= reference[1]


def _amplifying_rate(release: Release) -> float:
    return release.cohort.rate if release.amplifies else 1.0


def story_of(told: Told, path: Path) -> Story:
    """What the lines of a journal tell; ValueError if this version cannot read them."""
    first = told.entries[0]
    found = first.get("format")
    if found != FORMAT:
        raise ValueError(
            f"{path} is of format {found!r}, this version reads {FORMAT!r}: continue with the "
            "version of flwr-ppsgd that wrote it"
        )
    try:
        kinds = {FIRST: release_from_dict(first["release"])}
        story = Story(int(first["training"]), float(first["delta"]), kinds, torn=told.torn)
        for entry in told.entries[1:]:
            story.take(entry)
        for rest, times in told.charges.items():
            charge = load_charge(rest)
            story.take_charge(charge["kind"], charge["insecure"], times)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): continue with the version of flwr-ppsgd that wrote "
            "it"
        ) from None
    return story


class Journal:
    """The charges of one training.

    Opening it takes the lock, which the process keeps until it ends or calls ``close``.

    Args:
        directory: where the journal is, or will be.
        release: what the training publishes in a round.
        delta: δ at which ε is stated.
    """

    def __init__(self, directory: Path, release: Release, delta: float) -> None:
        disk.make_private(directory)
        self.directory = directory
        self._path = directory / NAME
        self._chain = Chain(self._path)
        self._warned = False
        try:
            self._lock()
            self._chain.refresh()
            if not self._chain.told.entries:
                self._begin(release, delta)
            self._story = story_of(self._chain.told, self._path)
            self._compare(release, delta)
            self._record = Record(self.training, directory)
            self._go_on()
        except BaseException:
            self.close()
            raise

    @property
    def training(self) -> int:
        """Names this training to its clients."""
        return self._story.training

    @property
    def ledger(self) -> Ledger:
        """What was charged."""
        return self._story.ledger

    @property
    def story(self) -> Story:
        """Everything that was written down."""
        return self._story

    @property
    def is_open(self) -> bool:
        return self._chain.is_open

    def plan(self, charges: int, rounds: int) -> None:
        """Write down how much is planned in all, if that is more than before.

        Args:
            charges: the number of charges. A round that is charged twice counts twice.
            rounds: the number of rounds.
        """
        if charges > self._story.planned or rounds > self._story.planned_rounds:
            self._note({"planned": charges, "rounds": rounds})

    def begin(self, round_: int) -> None:
        """Write down that a server starts with this round.

        What clients did in this round or later counts for nothing.
        """
        self._note({"begins": round_})

    def note_sum(self, name: str, numbers: list[float]) -> None:
        """Write down what was released before the first round: nobody is asked again."""
        self._note({"sum": name, "numbers": numbers})

    def note_evaluation(self) -> None:
        """Write down that there is evaluation on client data."""
        if not self._story.evaluated:
            self._note({"evaluation": True})

    def note_caveat(self, caveat: str, unit: str = "user") -> None:
        """Write down what every statement must say from now on; each caveat once.

        Args:
            caveat: the words.
            unit: who is protected: "user", or "node" if a user may come back as another node.
        """
        if caveat in self._story.caveats:
            return
        entry = {"caveat": caveat}
        if unit != "user":
            entry["unit"] = unit
        self._note(entry)

    def join(self, budget: int, directory: Path) -> None:
        """Write down that the training is under a budget, for ever and from its beginning.

        Args:
            budget: the id of the budget.
            directory: where it is.
        """
        charged = self.ledger.rounds
        before = self._story.budget
        if before is None and charged:
            raise ValueError(
                f"{self._path} has {charged} charges that the budget in {directory} never saw: a "
                "training joins a budget before its first round; start anew in another "
                "checkpoint_dir"
            )
        if before is not None and before != budget:
            raise ValueError(
                f"{self._path} is under the budget in {self._story.budget_dir}, not under the one "
                f"in {directory}: set budget_dir to the former"
            )
        if before is None:
            self._note({"budget": budget, "directory": str(directory.resolve())})

    def charge(self, round_: int, insecure: bool, release: Release | None = None) -> None:
        """Write one release down.

        When this returns, it is on the disk, and in the record outside; only then may anything be
        released.

        Args:
            round_: the absolute round.
            insecure: whether its coins come from a known seed.
            release: what is released; None is what the first line tells.
        """
        kind = self._kind(release)
        self._chain.append({"round": round_, "kind": kind, "insecure": insecure})
        self._story.take_charge(kind, insecure)
        self._keep_record()

    def reserve(self) -> None:
        """Make sure that there is room on the disk for a round's lines."""
        self._chain.reserve()

    def close(self) -> None:
        """Give up the lock; harmless if that was done before."""
        self._chain.close()

    def _note(self, entry: dict[str, Any]) -> None:
        self._chain.append(entry)
        self._story.take(entry)

    def _kind(self, release: Release | None) -> int:
        """The number of a release; a new one is defined first."""
        if release is None:
            return FIRST
        for kind, known in self._story.kinds.items():
            if known == release:
                return kind
        kind = len(self._story.kinds)
        self._note({"kind": kind, "release": release_to_dict(release)})
        return kind

    def _keep_record(self) -> None:
        """Write the outside record; a training goes on without it, and says so."""
        try:
            self._record.write(self.ledger.rounds)
        except OSError as error:
            if not self._warned:
                log.warning(
                    "The record of charges cannot be written (%s): a journal that goes back in "
                    "time would not show. Set PPSGD_STATE_HOME to a directory that can be written",
                    error,
                )
            self._warned = True
            self.note_caveat(RECORD_NOT_WRITTEN)

    def _lock(self) -> None:
        """A ServerApp outlives its SuperLink by some seconds: wait for it to let go."""
        if not self._chain.lock(PATIENCE):
            raise ValueError(
                f"{self._path} is in use by another training: two of them would spend one budget "
                "twice; wait for it to end, or choose another checkpoint_dir"
            )

    def _begin(self, release: Release, delta: float) -> None:
        """Write the first line of a new journal.

        A torn first line is a new journal, unless something shows that there was a training.
        """
        if self._chain.told.torn:
            self._refuse_if_trained()
            self._chain.clear()
        Ledger(delta)  # a δ that is none is refused before anything is written
        self._chain.append(
            {
                "format": FORMAT,
                "training": secrets.randbits(62),
                "delta": delta,
                "release": release_to_dict(release),
            }
        )
        disk.sync_directory(self.directory)

    def _refuse_if_trained(self) -> None:
        """DamagedError if a checkpoint or a record shows that this journal had more than a line."""
        named = TRAINING.search(self._path.read_bytes())
        if named:
            recorded = Record(int(named[1]), self.directory).path.exists()
        else:
            recorded = record.any_of(self.directory)
        if recorded or checkpoint.files(self.directory):
            raise DamagedError(self._path, 1)

    def _go_on(self) -> None:
        """Compare with what is known elsewhere; then make a torn end whole."""
        charged = self.ledger.rounds
        known = self._record.read()
        if known is not None and known > charged:
            raise behind(self.directory, charged, known, "the record outside the directory shows")
        if self._chain.reader.missing:
            found = checkpoint.load(self.directory)
            if found is not None and found.charged > charged:
                raise behind(self.directory, charged, found.charged, "w has had")
            log.warning(
                "%s ends in a torn line, which counts as one charge: %d are charged now",
                self._path,
                charged,
            )
            self._chain.mend()
        if known is None and charged:
            self.note_caveat(NO_RECORD)

    def _compare(self, release: Release, delta: float) -> None:
        """Refuse to continue under other privacy settings, naming each that differs."""
        kept = self._story.kinds[FIRST]
        if kept == release and self._story.delta == delta:
            return
        before = {"delta": self._story.delta, **release_to_dict(kept)}
        now = {"delta": delta, **release_to_dict(release)}
        changed = [
            f"{key} was {before.get(key)} and is {now.get(key)}"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
        raise ValueError(
            f"{self._path} belongs to a training with other privacy settings "
            f"({'; '.join(changed)}): continue with the old ones, or start anew in another "
            "checkpoint_dir"
        )


def behind(directory: Path, charged: int, known: int, who: str) -> ValueError:
    """The error for a journal that has lost charges.

    Args:
        directory: where the journal is.
        charged: the number of charges in it.
        known: the number that is known to have been made.
        who: knows it, in words.
    """
    return ValueError(
        f"the journal in {directory} shows {charged} rounds but {who} {known}: charges were lost, "
        "so the training is not continued; put the newest journal back, or add what is missing "
        f"with: ppsgd ledger {directory} --add {known - charged}"
    )


def read_story(directory: Path) -> Story:
    """What the journal in a directory tells, without a lock; ValueError if there is none."""
    path = directory / NAME
    if not path.is_file():
        raise ValueError(
            f"no journal in {directory}: name a checkpoint directory, with a {NAME} in it"
        )
    told = read_only(path).told
    if not told.entries:
        raise ValueError(f"{path} has no whole line: no training has begun there")
    return story_of(told, path)
