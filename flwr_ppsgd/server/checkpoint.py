"""w on disk: written beside the old one, synced, renamed into place; the one before is kept."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flwr_ppsgd import disk as durable
from flwr_ppsgd.algorithm import Vector

log = logging.getLogger("flwr.ppsgd")

FORMAT = "flwr_ppsgd checkpoint 1"
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """After ``round`` rounds and ``charged`` charges: w as named serialised arrays, and Σ_{t<n} w_t where the average
    iterate is kept."""

    round: int
    arrays: dict[str, bytes]
    charged: int
    iterates: Vector | None = None

    def to_bytes(self) -> bytes:
        """A line of JSON that says what follows, then the arrays; the first line is a checksum of the rest."""
        iterates = b"" if self.iterates is None else self.iterates.tobytes()
        head = {
            "format": FORMAT,
            "round": self.round,
            "charged": self.charged,
            "arrays": {name: len(data) for name, data in self.arrays.items()},
            "iterates": len(iterates),
        }
        return b"".join(durable.seal(head, [*self.arrays.values(), iterates]))

    @classmethod
    def from_bytes(cls, content: bytes) -> "Checkpoint":
        """ValueError unless every byte is as ``to_bytes`` wrote it."""
        head, data = durable.unseal(content)
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}, expected {FORMAT!r}")
        arrays, start = {}, 0
        for name, size in head["arrays"].items():
            arrays[name], start = bytes(data[start : start + size]), start + size
        iterates = np.frombuffer(data[start:]) if head["iterates"] else None
        return cls(head["round"], arrays, head["charged"], iterates)


def save(directory: Path, checkpoint: Checkpoint) -> None:
    """Atomic: whatever happens, the newest complete checkpoint is found again."""
    final = directory / f"w-{checkpoint.round:08d}.checkpoint"
    durable.write(final, [checkpoint.to_bytes()])
    for old in _files(directory)[:-KEPT]:
        old.unlink()


def load(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, saying which ones are not; None where there is none at all."""
    files = _files(directory)
    for path in reversed(files):
        try:
            return Checkpoint.from_bytes(path.read_bytes())
        except (ValueError, KeyError, OSError) as error:
            log.warning("%s is damaged (%s): w falls back to the one before, the ledger does not", path, error)
    if files:
        raise ValueError(f"no checkpoint of w in {directory} is whole: restore one, or start anew in another directory")
    return None


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("w-*.checkpoint"))
