"""What the columns of a file are called."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flwr_ppsgd.data.raw import Raw, Split


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of a file (or the arrays of an .npz) are called.

    target: several names separated by commas are several targets. test: marks the rows of the test part; default
    "test" where there is such a column and no other split is asked for. time: each user's last rows are the test part.
    features: default all other numeric columns; an .npz has ``x``, or CSR in ``indptr, indices, counts | data``.
    """

    user: str = "user"
    target: str = "y"
    test: str | None = None
    time: str | None = None
    features: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.test is not None and self.time is not None:
            raise ValueError("give a test column or a time column, not both: either one decides the test part")


def with_test_part(
    raw: Raw, found: Mapping[str, NDArray[Any]], columns: Columns, split: Split | None, path: Path
) -> Raw:
    """A test column, or how to choose the test part; what was passed over is noted."""
    if columns.time is not None:
        time = need(found, columns.time, path, "column")
        raw = replace(raw, time=time, time_name=columns.time, split=split or Split())
    elif split is not None:
        raw = replace(raw, split=split)
    elif columns.test is not None or "test" in found:
        name = columns.test or "test"
        return replace(raw, test=need(found, name, path, "column"), test_name=name)
    if "test" in found:
        raw = replace(raw, notes=(*raw.notes, "column 'test' left out: another split was asked for"))
    return raw


def need(found: Mapping[str, NDArray[Any]], name: str, path: Path, what: str) -> NDArray[Any]:
    return found[known(name, found, path, what)]


def known(name: str, there: Iterable[Any], path: Path, what: str) -> str:
    names = [str(other) for other in there]
    if name in names:
        return name
    nearest = (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or ["nothing"])[0]
    raise ValueError(
        f"{path}: there is no {what} {name!r} among {', '.join(names[:12])}{', …' * (len(names) > 12)}: did you mean "
        f"{nearest!r}?"
    )
