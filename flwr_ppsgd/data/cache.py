"""What took long to read is kept as an .npz, which ``read`` takes too."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flwr_ppsgd.data.files import read
from flwr_ppsgd.data.npz import write_npz
from flwr_ppsgd.data.per_user import PerUser

log = logging.getLogger("flwr.ppsgd")


def cached(make: Callable[[], PerUser], source: Path | str, options: object, cache_dir: str | Path | None) -> PerUser:
    """``make()``, or what it gave for the same source and options before; a file that cannot be read is made again.

    source: a file or a folder, known by name, size and time of change; or the name of a hub data set.
    """
    path = cache_file(source, options, cache_dir)
    if path.is_file():
        try:
            return replace(read(path), source=str(source))
        except ValueError:
            path.unlink()
    data = make()
    try:
        write_npz(data, path)
    except OSError as error:
        log.warning("%s: what was read could not be kept for the next time: %s", path, error)
    return data


def cache_file(source: Path | str, options: object, cache_dir: str | Path | None) -> Path:
    stem = Path(source).name if isinstance(source, Path) else source.replace("/", "-")
    key = hashlib.sha256(repr((stem, _stamp(source), options)).encode()).hexdigest()[:12]
    return cache_folder(source, cache_dir) / f"{stem}.{key}.npz"


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flwr-ppsgd"


def cache_folder(source: Path | str, cache_dir: str | Path | None) -> Path:
    """``cache_dir``; else next to the source; else, where one may not write there, in the user's cache directory."""
    if cache_dir is not None:
        return Path(cache_dir)
    if isinstance(source, Path) and os.access(source.parent, os.W_OK):
        return source.parent
    return user_cache()


def _stamp(source: Path | str) -> list[tuple[str, int, int]]:
    if isinstance(source, str):
        return []
    files = sorted(source.rglob("*.parquet")) if source.is_dir() else [source]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
