"""Bad input becomes one line: the rule, the value that breaks it, and what to change."""

import difflib
import numbers
from collections.abc import Collection, Iterable
from typing import TypeVar

LARGEST_COUNT = 2**50
Value = TypeVar("Value")
SHORTEST_KEY = 5  # letters; shorter keys are one edit away from too many others


def require(holds: bool, rule: str, value: object, remedy: str) -> None:
    """Raise ValueError unless ``holds``. Write the condition so that NaN fails it."""
    if not holds:
        raise ValueError(f"{rule}, got {value!r}: {remedy}")


def fast_replace(value: Value, **changes: object) -> Value:
    """``dataclasses.replace`` several times as fast, without the checks of ``__post_init__``."""
    fresh = object.__new__(type(value))
    fresh.__dict__.update(value.__dict__, **changes)
    return fresh


def is_whole(value: object) -> bool:
    """Whether ``value`` is a whole number, numpy's integers included; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number, numpy's included; True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def count(name: str, value: int) -> int:
    """``value`` as a plain int; ValueError unless it is a whole number of at least 1."""
    rule = f"{name} must be a whole number from 1 to 2^50"
    require(is_whole(value) and 1 <= value <= LARGEST_COUNT, rule, value, f"set {name}")
    return int(value)


def one_of(name: str, value: str, choices: Collection[str]) -> None:
    """ValueError unless ``value`` is among ``choices``."""
    if value in choices:
        return
    rule = f"{name} must be one of {', '.join(choices)}"
    require(False, rule, value, f"did you mean {nearest(value, choices)!r}?")


def nearest(key: object, known: Iterable[str]) -> str:
    """The known word that is one edit away, or begins with ``key``, or is most like it."""
    known = list(known)
    near = misspelt(str(key), known)
    if near is not None:
        return near
    longer = [word for word in known if word.startswith(f"{key}-")]
    if longer:
        return longer[0]
    return difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]


def misspelt(key: str, known: Iterable[str]) -> str | None:
    """The known key of five letters or more that ``key`` is one edit away from, or None.

    An edit is a letter more, less, replaced, or two swapped.
    """
    for other in known:
        if len(other) >= SHORTEST_KEY and key != other and _one_edit(key, other):
            return other
    return None


def _one_edit(left: str, right: str) -> bool:
    while left and right and left[0] == right[0]:
        left = left[1:]
        right = right[1:]
    while left and right and left[-1] == right[-1]:
        left = left[:-1]
        right = right[:-1]
    swapped = len(left) == 2 and left == right[::-1]
    return swapped or max(len(left), len(right)) == 1


def printable(text: object, most: int) -> str:
    """A text from somebody else as one line for a terminal: no control characters, not too long."""
    words = " ".join(str(text)[: 4 * most].split())
    shown = "".join(letter if letter.isprintable() else "?" for letter in words)
    return shown[:most]
