"""What took long to read is kept as an .npz, which ``read`` takes too."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flwr_ppsgd.lab.data.files import read
from flwr_ppsgd.lab.data.npz import write_npz
from flwr_ppsgd.lab.data.per_user import PerUser

log = logging.getLogger("flwr.ppsgd")


def cached(
    make: Callable[[], PerUser],
    source: Path | str,
    options: object,
    cache_dir: str | Path | None,
) -> PerUser:
    """``make()``, or what it returned for the same source and options before.

    A kept file that cannot be read is made again.

    Args:
        make: reads the source.
        source: a file or a folder, recognised by name, size and time of change; or the name of a
            data set on the hub.
        options: everything else that decides what ``make`` returns.
        cache_dir: where to keep it; None is as in ``cache_folder``.
    """
    path = cache_file(source, options, cache_dir)
    if path.is_file():
        try:
            return replace(read(path), source=str(source))
        except ValueError:
            path.unlink(missing_ok=True)
    data = make()
    try:
        write_npz(data, path)
    except OSError as error:
        log.warning("%s: what was read could not be kept for the next time: %s", path, error)
    return data


def cache_file(
    source: Path | str,
    options: object,
    cache_dir: str | Path | None,
) -> Path:
    """The file in which a source, read with these options, is kept."""
    stem = source.name if isinstance(source, Path) else source.replace("/", "-")
    identity = repr((stem, _stamp(source), options))
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_folder(source, cache_dir) / f"{stem}.{key}.npz"


def user_cache() -> Path:
    """The user's cache directory for this package."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "flwr-ppsgd"


def cache_folder(source: Path | str, cache_dir: str | Path | None) -> Path:
    """``cache_dir`` if it is given; else the source's folder, if it is writable; else the user's
    cache directory."""
    if cache_dir is not None:
        return Path(cache_dir)
    if isinstance(source, Path) and os.access(source.parent, os.W_OK):
        return source.parent
    return user_cache()


def _stamp(source: Path | str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a source's files."""
    if isinstance(source, str):
        return []
    files = sorted(source.rglob("*.parquet")) if source.is_dir() else [source]
    stamps = []
    for file in files:
        if file.is_file():
            found = file.stat()
            stamps.append((file.name, found.st_size, found.st_mtime_ns))
    return stamps
