"""What the columns of a file are called."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flwr_ppsgd.checks import nearest, one_of, require
from flwr_ppsgd.lab.data.raw import IMPUTE, REFUSE, Raw
from flwr_ppsgd.lab.data.split import Split

MOST_SHOWN = 12  # names that an error lists
OPTIONS = {"user": " (--user names the column)", "y": " (--target names the column)"}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of a file (or the arrays of an .npz) are called.

    Args:
        user: each row's user.
        target: what is learned. Several names, separated by commas, are several targets.
        test: marks the rows of the test part. The default is "test", if there is such a column and
            no other split is asked for.
        time: each user's last rows are the test part.
        features: the default is all other numeric columns. An .npz has ``x``, or CSR in ``indptr``,
            ``indices`` and ``counts`` or ``data``.
        exclude: columns that are not used.
        categorical: columns of categories: one feature for each value, hashed if there are many.
        text: columns of text: the share of each word, hashed.
        sep: what separates the values of a .csv.
        encoding: of a .csv.
        impute: what stands for a feature that is missing or not finite, see ``raw.IMPUTE``.
    """

    user: str = "user"
    target: str = "y"
    test: str | None = None
    time: str | None = None
    features: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    sep: str = ","
    encoding: str = "utf-8"
    impute: str = REFUSE

    def __post_init__(self) -> None:
        one_of("impute", self.impute, IMPUTE)
        rule = "sep must be one character"
        require(len(self.sep) == 1, rule, self.sep, "as in --sep ';' or --sep '\\t'")
        if self.test is not None and self.time is not None:
            raise ValueError(
                f"give a test column or a time column, not both, got {self.test!r} and "
                f"{self.time!r}: either one decides the test part"
            )


def with_test_part(
    raw: Raw,
    found: Mapping[str, NDArray[Any]],
    columns: Columns,
    split: Split | None,
    path: Path,
) -> Raw:
    """``raw`` with a test column, or with how to choose the test part; a note says what is ignored.

    Args:
        raw: the rows.
        found: the columns that may mark or order the test part.
        columns: their names.
        split: chooses the test part in place of a column.
        path: the file, for messages.
    """
    if columns.time is not None:
        time = need(found, columns.time, path, "column")
        raw = replace(
            raw,
            time=time,
            time_name=columns.time,
            split=split or Split(),
        )
    elif split is not None:
        raw = replace(raw, split=split)
    elif columns.test is not None or "test" in found:
        name = columns.test or "test"
        test = need(found, name, path, "column")
        return replace(raw, test=test, test_name=name)
    if "test" in found:
        note = "column 'test' left out: another split was asked for"
        raw = replace(raw, notes=(*raw.notes, note))
    return raw


def need(
    found: Mapping[str, NDArray[Any]],
    name: str,
    path: Path,
    what: str,
) -> NDArray[Any]:
    """The column of this name; ValueError with the nearest name if there is none."""
    return found[known(name, found, path, what)]


def known(
    name: str,
    there: Iterable[Any],
    path: Path,
    what: str,
) -> str:
    """``name``, if it is among the names ``there``; else ValueError with the nearest one.

    Args:
        name: the name to look for.
        there: the names that the file has.
        path: the file, for the message.
        what: "column", "array" or "feature", for the message.
    """
    names = [str(other) for other in there]
    if name in names:
        return name
    shown = ", ".join(names[:MOST_SHOWN])
    if len(names) > MOST_SHOWN:
        shown += ", …"
    close = nearest(name, names) if names else "nothing"
    option = OPTIONS.get(name, "")
    raise ValueError(
        f"{path}: there is no {what} {name!r} among {shown}: did you mean {close!r}?{option}"
    )
