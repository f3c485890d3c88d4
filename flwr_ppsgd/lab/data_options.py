"""What a person says about a file of users' rows."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which columns are the user, the target, categories and test rows.

    Whatever is not said is found in the file. Several columns are separated by commas. With a
    schema nothing else is said or looked for.

    Args:
        schema: a file that says what is public about the rows.
        user: the column that names the user; "user" by default.
        target: the columns to predict; "y" by default.
        task: classification, regression or multi-label; found in the values by default.
        features: the columns to predict from; all others by default.
        exclude: columns that are not used.
        categorical: columns of categories.
        text: columns of text, made shares of hashed words.
        test: the column in which 1 marks test rows; "test" by default.
        time: the column that orders a user's rows: the last ones are test rows.
        test_fraction: each user's test part, if no column marks it.
        impute: for gaps: drop (the row), zero or own-mean.
        encoding: of a .csv.
        split_seed: decides which rows are test rows.
    """

    schema: str = ""
    user: str = ""
    target: str = ""
    task: str = ""
    features: str = ""
    exclude: str = ""
    categorical: str = ""
    text: str = ""
    test: str = ""
    time: str = ""
    test_fraction: float | None = None
    impute: str = ""
    encoding: str = ""
    split_seed: int = 0

    def __post_init__(self) -> None:
        if self.test and (self.time or self.test_fraction is not None):
            raise ValueError(
                f"a test column ({self.test!r}) and a time column or test fraction are both given: "
                "either one decides the test part, so give one of them"
            )
