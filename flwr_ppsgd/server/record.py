"""How many charges a training has made, kept outside its directory.

A journal that went back in time, such as a backup that was restored, shows fewer charges than this
record. A snapshot of the whole machine takes the record back too.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from flwr_ppsgd import disk

log = logging.getLogger("flwr.ppsgd")

FORMAT = "flwr_ppsgd record 1"
SUFFIX = ".charges"


def home() -> Path:
    """Where records are: ``$PPSGD_STATE_HOME``, ``$XDG_STATE_HOME/ppsgd`` or
    ``~/.local/state/ppsgd``.

    The first that is set counts. OSError if there is no home directory.
    """
    own = os.environ.get("PPSGD_STATE_HOME")
    if own:
        return Path(own)
    shared = Path(os.environ.get("XDG_STATE_HOME", ""))
    if shared.is_absolute():  # others do not count, by the XDG specification
        return shared / "ppsgd"
    try:
        return Path.home() / ".local" / "state" / "ppsgd"
    except RuntimeError as error:
        raise OSError(f"no place for records ({error}): set PPSGD_STATE_HOME") from None


@dataclass(frozen=True)
class Record:
    """The record of one training, or of one budget.

    Args:
        training: its id, which names the file.
        directory: where its journal is. It tells whose record this is if the id is lost.
    """

    training: int
    directory: Path

    @property
    def path(self) -> Path:
        return home() / f"{self.training}{SUFFIX}"

    def read(self) -> int | None:
        """The number of charges; None if there is no record that can be read."""
        try:
            return _charges(self.path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("The record of charges cannot be read: %s", error)
            return None

    def write(self, charges: int) -> None:
        """Replace the number of charges. When this returns, it is on the disk."""
        path = self.path
        disk.make_private(path.parent)
        head = {
            "format": FORMAT,
            "training": self.training,
            "charges": charges,
            "directory": str(self.directory.resolve()),
        }
        disk.write(path, disk.seal(head, []), mode=disk.PRIVATE_FILE)


def any_of(directory: Path) -> bool:
    """Whether some training that was in this directory has a record."""
    own = str(directory.resolve())
    try:
        paths = list(home().glob(f"*{SUFFIX}"))
    except OSError:
        return False
    return any(_directory(path) == own for path in paths)


def _charges(path: Path) -> int:
    head, _ = disk.unseal(path.read_bytes())
    if head["format"] != FORMAT:
        raise ValueError(f"{path} is of format {head['format']!r}, this version reads {FORMAT!r}")
    return int(head["charges"])


def _directory(path: Path) -> str:
    try:
        head, _ = disk.unseal(path.read_bytes())
    except (OSError, ValueError):
        return ""
    return str(head.get("directory", ""))
