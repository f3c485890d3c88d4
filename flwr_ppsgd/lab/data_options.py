"""What a person says about a file of users' rows: the options that commands share."""

from dataclasses import dataclass, field, fields
from typing import Any


def _option(key: str, metavar: str = "", help_text: str = "") -> Any:
    """A field that stands for a setting.

    Args:
        key: the flat setting.
        metavar: of the command-line option, if there is one.
        help_text: of that option, in one line.
    """
    return field(default=None, metadata={"key": key, "metavar": metavar, "help": help_text})


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which columns are the user, the target, categories and test rows; None leaves it to the file.

    Several columns are separated by commas. With a schema nothing else is said or looked for.
    ``text`` are columns of text, made shares of hashed words; in ``test``, 1 marks test rows.
    """

    schema: str | None = _option(
        "schema", "FILE", "What is public about the rows, from look --write."
    )
    user: str | None = _option("user-column", "COLUMN", "Names the user; default: user.")
    target: str | None = _option("target-column", "COLUMN", "What to predict; default: y.")
    task: str | None = _option("task", "TASK", "classification, regression or multi-label.")
    features: str | None = _option("feature-columns")
    exclude: str | None = _option("exclude-columns", "A,B,…", "Columns that are not used.")
    categorical: str | None = _option("categorical-columns", "A,B,…", "Columns of categories.")
    text: str | None = _option("text-columns")
    test: str | None = _option("test-column")
    time: str | None = _option("time-column")
    test_fraction: float | None = _option("test-fraction")
    impute: str | None = _option("impute", "RULE", "For gaps: drop (the row), zero or own-mean.")
    encoding: str | None = _option("encoding")
    split_seed: int = 0

    def __post_init__(self) -> None:
        if self.test and self.time:
            raise ValueError(
                f"give a test column or a time column, not both, got {self.test!r} and "
                f"{self.time!r}: either one decides the test part"
            )
        if self.test and self.test_fraction is not None:
            raise ValueError(
                f"test column {self.test!r} and a test fraction are both given: give one of them"
            )

    def to_flat(self) -> dict[str, Any]:
        """The settings that typed options stand for."""
        found = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None and "key" in option.metadata:
                found[option.metadata["key"]] = value
        return found


def typed_options() -> list[Any]:
    """The fields of ``DataOptions`` that are options of commands."""
    return [option for option in fields(DataOptions) if option.metadata.get("metavar")]


def names_in(text: str | None) -> list[str]:
    """The columns in a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
