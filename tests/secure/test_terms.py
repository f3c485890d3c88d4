"""The terms are in every key of a session, and hold the release and its measures."""

from dataclasses import replace

import pytest

from flwr_ppsgd import Poisson, PrivateMetrics, Release, SecureSum
from flwr_ppsgd.secure.terms import TYPES, SecureTerms, Session

RULES = SecureSum(honest=26, colluding=2)
METRICS = PrivateMetrics({"loss": 2.0}, 0.1)
TERMS = SecureTerms.of(Release(Poisson(30, 1.0), 1.5, 4.0, aggregation=RULES), METRICS)
SESSION = Session(TERMS, training=7, run=3, start=1, round=5)
OTHERS = {
    "population": 31,
    "clip_norm": 1.25,
    "noise_multiplier": 3.5,
    "honest": 16,
    "colluding": 3,
    "failure": 1e-9,
    "neighbours": 10,
    "share": 0.2,
    "bounds": "3.0",
}


def test_every_field_is_in_the_label() -> None:
    """Terms, training, run, start, round and part: another label, so other keys and masks."""
    assert OTHERS.keys() == TYPES.keys()
    others = [replace(SESSION, terms=replace(TERMS, **{name: v})) for name, v in OTHERS.items()]  # type: ignore[arg-type]
    for name, value in {"training": 8, "run": 4, "start": 2, "round": 6, "part": "unit"}.items():
        others.append(replace(SESSION, **{name: value}))  # type: ignore[arg-type]
    labels = {session.label for session in (SESSION, *others)}
    assert len(labels) == 1 + len(others)
    again = Session(SecureTerms(**TERMS.to_flat()), training=7, run=3, start=1, round=5)
    assert again.label == SESSION.label


def test_a_client_gets_the_release_and_its_measures_from_the_terms() -> None:
    assert TERMS.rules == RULES
    assert TERMS.release.clip_norm == 1.5
    assert TERMS.metrics(["loss"]) == METRICS
    with pytest.raises(ValueError, match="1 bounds for 2 private measures"):
        TERMS.metrics(["loss", "accuracy"])
    with pytest.raises(ValueError, match="honest must be at least 2"):
        _ = replace(TERMS, honest=1).rules
