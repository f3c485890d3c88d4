"""The memory of one training: what was charged, what was planned and said, and w.

One SQLite file, ``training.sqlite``, with one sealed row per charge, and w as files beside it. A
charge is on the disk before anything is released, and never taken back: if w has to fall back to an
earlier one, the charges do not. What may not be public, such as who replied, is in the same file,
so it is for the server's operator alone.
"""

import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from flwr_ppsgd import database
from flwr_ppsgd.algorithm import Release, Vector
from flwr_ppsgd.database import FileLock, StoreError, private_directory
from flwr_ppsgd.ledger import Ledger, release_to_dict
from flwr_ppsgd.server.sealed import SealedRows
from flwr_ppsgd.signature import KEY

log = logging.getLogger("flwr.ppsgd")

NAME = "training.sqlite"
LOCK = "training.lock"
ARRAYS = "w-*.arrays"
KEPT = 2  # checkpoints
PATIENCE = 60.0  # seconds: a ServerApp outlives its SuperLink a little


@dataclass(frozen=True)
class Checkpoint:
    """The state of w after a round.

    Args:
        round: the round.
        arrays: w as named serialised arrays.
        state: what the next round needs besides w, as named vectors.
    """

    round: int
    arrays: dict[str, bytes]
    state: Mapping[str, Vector] = field(default_factory=dict)


class Store(SealedRows):
    """The memory of one training. The lock is held from opening to ``close``.

    Args:
        directory: where it is, or will be; None is in memory.
        read_only: write nothing, for reports; the lock is not taken. The file must exist.
        repair: open it although charges were lost, to add them by hand.
    """

    def __init__(
        self, directory: Path | None, *, read_only: bool = False, repair: bool = False
    ) -> None:
        path = None if directory is None else directory / NAME
        super().__init__(path, "training", read_only=read_only, repair=repair)
        self.directory = directory
        self._lock: FileLock | None = None
        self._unsaved: Checkpoint | None = None
        self._warned_of_facts = False
        self.open()

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The store as it is now, for reports: without the lock, while a training runs too."""
        if not (directory / NAME).is_file():
            raise StoreError(
                f"no training in {directory}: name a checkpoint directory, with a {NAME} in it"
            )
        return cls(directory, read_only=True)

    def open(self) -> None:
        """Take the lock and read everything, unless it is open.

        After ``close`` this goes on from the disk as after a restart. A w that could not be saved
        is saved first.
        """
        if self.is_open:
            return
        if self.directory is not None and not self._read_only:
            private_directory(self.directory)
            busy = (
                f"{self.directory} is in use by another training: two of them would spend one "
                "budget twice; wait for it to end, or choose another checkpoint_dir"
            )
            self._lock = FileLock(self.directory / LOCK, PATIENCE, busy)
        try:
            super().open()
            if self._lock is not None and not self._repair:
                self._remove_old_arrays()
            if self._unsaved is not None:
                self.save(self._unsaved)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up the lock; closing twice does nothing."""
        super().close()
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def refuse_lost_rows(self) -> None:
        """StoreError also if there is a file of w that has had more charges than are here."""
        super().refuse_lost_rows()
        for path in reversed(self._arrays()):
            charges = int(path.stem.rpartition("-")[2])
            self.refuse_fewer_charges(charges, f"{path.name} has had")

    def backup(self, target: Path) -> None:
        """Copy the file consistently, and w and the key beside it, also while a training runs."""
        private_directory(target.parent)
        assert self.directory is not None
        for path in [*self._arrays(), self.directory / KEY]:
            with suppress(FileNotFoundError):  # the training may go on meanwhile
                database.write_file(target.with_name(path.name), [path.read_bytes()])
        super().backup(target)

    # --- settings that never change

    def settle(self, **settings: Any) -> None:
        """Fix settings for good; StoreError names each that was another before.

        A Release is the one that charges added by hand are taken for, until others are charged.
        """
        changed = []
        for name, value in settings.items():
            plain = release_to_dict(value) if isinstance(value, Release) else value
            before = self.setting(name)
            if before is None:
                with self.transaction() as add:
                    add("setting", [name, plain])
                    if isinstance(value, Release) and value not in self.kinds:
                        add("release", plain)
            elif before != plain:
                changed += _differences(name, before, plain)
        if changed:
            raise StoreError(
                f"{self.path} belongs to a training with other privacy settings "
                f"({'; '.join(changed)}): continue with the old ones, or start anew in another "
                "checkpoint_dir"
            )

    def setting(self, name: str) -> Any:
        """A setting that was fixed; None if it never was."""
        return dict(self.notes("setting")).get(name)

    # --- charges

    def charge(self, round_: int, release: Release, *, insecure: bool = False) -> None:
        """Write one release down. Only when this has returned may anything be released.

        Round 0 is before the first; ``insecure`` if its noise comes from a known seed.
        """
        with self.transaction() as add:
            self._add_charge(add, self.owner, round_, release, insecure)

    def charges(self) -> Counter[tuple[Release, bool]]:
        """How often each release was charged, and whether with noise from a known seed.

        Of a charge that was added by hand the release is not known: it counts as each that might be
        the most expensive.
        """
        found: Counter[tuple[Release, bool]] = Counter()
        for (_, kind, insecure), times in self.tally.items():
            found[self.kinds[kind], insecure] += times
        if self.added:
            for release in _most_expensive(self.kinds):
                found[release, False] += self.added
        return found

    def ledger(self, delta: float) -> Ledger:
        """The charges, counted: their order does not matter for ε."""
        ledger = Ledger(delta)
        for (release, insecure), times in self.charges().items():
            ledger = ledger.record(release, times, insecure=insecure)
        return ledger

    @property
    def planned(self) -> tuple[int, int]:
        """The largest numbers of charges and rounds that were planned: the last plan has both."""
        plans = self.notes("plan")
        if not plans:
            return 0, 0
        return plans[-1]["charges"], plans[-1]["rounds"]

    # --- facts that are the server's alone

    def record_fact(self, fact: Mapping[str, Any]) -> None:
        """Note what came back, or went wrong, with the time: never a reason to stop a round."""
        if not self.is_open:
            return
        try:
            with self._sqlite().transaction() as connection:
                row = (time.time(), json.dumps(dict(fact), ensure_ascii=False))
                connection.execute("INSERT INTO fact (time, value) VALUES (?, ?)", row)
        except StoreError as error:
            if not self._warned_of_facts:
                log.warning("Facts for the server's operator cannot be written: %s", error)
            self._warned_of_facts = True

    def facts(self) -> Iterable[tuple[float, dict[str, Any]]]:
        """What was noted, with its time in seconds since 1970; oldest first."""
        for at, text in self._sqlite().rows("SELECT time, value FROM fact ORDER BY id"):
            try:
                yield at, json.loads(text)
            except ValueError:  # damaged; nobody's privacy depends on it
                continue

    # --- files beside the rows

    def reserve(self, size: int = 0) -> None:
        """Take room for all that a round will write, after what an earlier one could not write."""
        if self._unsaved is not None:
            self.save(self._unsaved)
        super().reserve(size)

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep w after a round, and the one before.

        If that fails, no other round may run before it has succeeded: ``open`` and ``reserve``
        try again.
        """
        if self.directory is None:
            return
        self._unsaved = checkpoint
        name = f"w-{checkpoint.round:08d}-{self.charge_count:08d}.arrays"
        with self.transaction() as add:  # which refuses a forked child before a file is written
            try:
                parts = _parts_of(checkpoint)
                sha256 = database.write_file(self.directory / name, parts, self.reserve_file)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"w of round {checkpoint.round} could not be saved in {self.directory} "
                    f"({error.strerror}): the round is charged; free some space, or repair the "
                    "disk, before you start again",
                ) from error
            add("checkpoint", {"round": checkpoint.round, "file": name, "sha256": sha256})
        self._unsaved = None
        self._remove_old_arrays()

    def load(self) -> Checkpoint | None:
        """The newest w that is whole; None if no w was saved. Those that are damaged are logged."""
        found = self.notes("checkpoint")
        if self.directory is None or not found:
            return None
        kept = {path.name for path in self._arrays()}
        for entry in reversed(found):
            if entry is not found[-1] and entry["file"] not in kept:
                continue
            try:
                content = database.read_verified(self.directory / entry["file"], entry["sha256"])
                return _checkpoint_of(entry["round"], content)
            except StoreError as error:
                log.warning("%s: w falls back to the one before, the ledger does not", error)
        raise StoreError(
            f"no checkpoint of w in {self.directory} is whole: restore one, or start anew in "
            "another directory"
        )

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The content of a small file, made if it is missing; StoreError if it was changed.

        In memory it is made anew each time.
        """
        if self.directory is None:
            return make()
        path = self.directory / name
        if not path.exists() or not self.notes(name):
            sha256 = database.write_file(path, [make()])
            self.note(name, sha256)
        return database.read_verified(path, self.notes(name)[-1])

    def _remove_old_arrays(self) -> None:
        """Keep the newest files of w; older ones go, and what a crash has left without a row."""
        assert self.directory is not None
        found = {path.name: path for path in self.directory.glob(f"{ARRAYS}*")}
        noted = [entry["file"] for entry in self.notes("checkpoint")]
        kept = [name for name in noted if name in found][-KEPT:]
        for name in found.keys() - set(kept):
            found[name].unlink()

    def _arrays(self) -> list[Path]:
        return [] if self.directory is None else sorted(self.directory.glob(ARRAYS))


def _parts_of(checkpoint: Checkpoint) -> list[bytes | memoryview]:
    """A line of JSON with names and sizes, then the arrays, then the state."""
    parts: list[bytes | memoryview] = list(checkpoint.arrays.values())
    for vector in checkpoint.state.values():
        numbers = np.ascontiguousarray(vector, np.float64)
        parts.append(numbers.data.cast("B"))
    head = {
        "arrays": list(checkpoint.arrays),
        "state": list(checkpoint.state),
        "sizes": [len(part) for part in parts],
    }
    return [json.dumps(head).encode() + b"\n", *parts]


def _checkpoint_of(round_: int, content: bytes) -> Checkpoint:
    """What ``_parts_of`` made, from bytes that are known to be whole."""
    start = content.index(b"\n") + 1
    head = json.loads(content[:start])
    ends = itertools.accumulate(head["sizes"], initial=start)
    parts = [content[a:b] for a, b in itertools.pairwise(ends)]
    arrays = dict(zip(head["arrays"], parts, strict=False))
    vectors = parts[len(arrays) :]
    state = {}
    for name, part in zip(head["state"], vectors, strict=True):
        state[name] = np.frombuffer(part)
    return Checkpoint(round_, arrays, state)


def _most_expensive(kinds: Iterable[Release]) -> list[Release]:
    """Of each price one release, unless another has no more noise and no more sampling."""
    prices = {}
    for release in kinds:
        rate = release.cohort.rate if release.amplifies else 1.0
        prices[release.noise_multiplier, rate] = release

    def is_dominated(noise: float, rate: float) -> bool:
        others = prices.keys() - {(noise, rate)}
        return any(z <= noise and q >= rate for z, q in others)

    return [release for price, release in prices.items() if not is_dominated(*price)]


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """What differs, field by field if both are mappings."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return [f"{name} was {before} and is {now}"]
    return [
        f"{key} was {before.get(key)} and is {now.get(key)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
