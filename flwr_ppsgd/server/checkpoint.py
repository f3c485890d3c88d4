"""w on disk: written beside the old one, synced, renamed into place; the one before is kept."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flwr_ppsgd import disk
from flwr_ppsgd.algorithm import Vector

log = logging.getLogger("flwr.ppsgd")

FORMAT = "flwr_ppsgd checkpoint 2"
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The state of w after a round.

    Args:
        round: the round.
        arrays: w as named serialised arrays.
        charged: the number of charges up to then.
        iterates: Σ_{t<n} w_t, if the average iterate is kept.
        state: of the server's optimizer, and the clip norm if it adapts, as named vectors.
    """

    round: int
    arrays: dict[str, bytes]
    charged: int
    iterates: Vector | None = None
    state: Mapping[str, Vector] = field(default_factory=dict)

    def to_parts(self) -> list[disk.Part]:
        """A sealed file: a head that says what follows, then the arrays."""
        iterates = b"" if self.iterates is None else self.iterates.tobytes()
        head = {
            "format": FORMAT,
            "round": self.round,
            "charged": self.charged,
            "arrays": {name: len(data) for name, data in self.arrays.items()},
            "iterates": len(iterates),
            "state": {name: vector.nbytes for name, vector in self.state.items()},
        }
        state = [np.asarray(vector, np.float64).tobytes() for vector in self.state.values()]
        return disk.seal(head, [*self.arrays.values(), iterates, *state])

    @classmethod
    def from_bytes(cls, content: bytes) -> "Checkpoint":
        """ValueError unless every byte is as it was written."""
        head, data = disk.unseal(content)
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}, expected {FORMAT!r}")
        arrays = head["arrays"]
        state = head["state"]
        parts = disk.cut(data, [*arrays.values(), head["iterates"], *state.values()])
        own = [bytes(part) for part in parts[: len(arrays)]]
        kept = [np.frombuffer(part) for part in parts[len(arrays) + 1 :]]
        iterates = np.frombuffer(parts[len(arrays)]) if head["iterates"] else None
        return cls(
            round=head["round"],
            arrays=dict(zip(arrays, own, strict=True)),
            charged=head["charged"],
            iterates=iterates,
            state=dict(zip(state, kept, strict=True)),
        )


def save(directory: Path, checkpoint: Checkpoint) -> None:
    """Atomic: whatever happens, the newest complete checkpoint is found again."""
    final = directory / f"w-{checkpoint.round:08d}.checkpoint"
    try:
        disk.write(final, checkpoint.to_parts())
    except OSError as error:
        raise OSError(
            error.errno,
            f"w of round {checkpoint.round} could not be saved in {directory} ({error.strerror}): "
            "the round is charged, and will be run and charged again; mend the disk before you "
            "start again",
        ) from error
    for old in files(directory)[:-KEPT]:
        old.unlink()


def load(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, saying which ones are not; None if there is none."""
    found = files(directory)
    for path in reversed(found):
        try:
            return Checkpoint.from_bytes(path.read_bytes())
        except (ValueError, KeyError, OSError) as error:
            log.warning(
                "%s is damaged (%s): w falls back to the one before, the ledger does not",
                path,
                error,
            )
    if found:
        raise ValueError(
            f"no checkpoint of w in {directory} is whole: restore one, or start anew in another "
            "directory"
        )
    return None


def newest(directory: Path) -> tuple[int, int] | None:
    """The round and the charges that the newest checkpoint names; None if there is none.

    Only its head is read, and not checked: quick, whatever the size of w, while a training runs.
    """
    for path in reversed(files(directory)):
        with suppress(OSError, ValueError, KeyError), path.open("rb") as file:
            file.readline()  # the checksum
            head = json.loads(file.readline())
            return int(head["round"]), int(head["charged"])
    return None


def files(directory: Path) -> list[Path]:
    """The checkpoints that are there, whole or not, oldest first."""
    return sorted(directory.glob("w-*.checkpoint"))
