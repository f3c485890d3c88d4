"""θ in a node's state: what is kept there, and what another process reads of it."""

import pickle
import weakref

import numpy as np
from flwr.app import Array, ArrayRecord, Context, RecordDict

from flwr_ppsgd.client.personal import STATE, Personal, keep
from tests.support.kept import kept_by

KEPT = Personal(
    np.arange(3.0),
    run=2**64 - 1,
    round=9,
    visit=4,
    stood=np.full(3, 0.5),
    training=2**63,
    start=2,
    since=1,
    base=3,
    seen=5,
    charges=11,
)


def node() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def assert_same(found: Personal | None, expected: Personal) -> None:
    assert found is not None
    no_save_seen = {**vars(expected), "seen": 0}
    for name, value in no_save_seen.items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


def serialised(state: RecordDict) -> RecordDict:
    """As Flower hands it to the process of the next message."""
    for record in state.values():
        assert isinstance(record, ArrayRecord)
        for array in record.values():
            assert array.data
    copied: RecordDict = pickle.loads(pickle.dumps(state))
    return copied


def test_a_kept_theta_is_read_with_its_stamp() -> None:
    context = node()
    keep(context, KEPT)
    assert_same(kept_by(context), KEPT)


def test_another_process_reads_the_same() -> None:
    context = node()
    keep(context, KEPT)
    context.state = serialised(context.state)
    assert_same(kept_by(context), KEPT)


def kept_record(context: Context) -> ArrayRecord:
    keep(context, KEPT)
    record = context.state[STATE]
    assert isinstance(record, ArrayRecord)
    return record


def test_a_theta_that_somebody_else_puts_there_counts() -> None:
    context = node()
    kept_record(context)["theta"] = Array(np.full(3, 7.0))
    found = kept_by(context)
    assert found is not None
    assert found.theta.tolist() == [7.0] * 3
    assert found.visit == KEPT.visit


def test_an_average_that_somebody_else_puts_there_counts() -> None:
    context = node()
    record = kept_record(context)
    record["stood"] = Array(np.full(3, 7.0))
    found = kept_by(context)
    assert found is not None
    assert found.stood is not None
    assert found.stood.tolist() == [7.0] * 3
    del record["stood"]
    without = kept_by(context)
    assert without is not None
    assert without.stood is None


def test_what_its_maker_does_afterwards_changes_nothing() -> None:
    theta = np.ones(3)
    stood = np.ones(3)
    context = node()
    keep(context, Personal(theta, run=1, stood=stood))
    theta[:] = 7.0
    stood[:] = 7.0
    found = kept_by(context)
    assert found is not None
    assert found.stood is not None
    assert [*found.theta, *found.stood] == [1.0] * 6


def test_vectors_are_kept_once() -> None:
    context = node()
    theta = np.ones(3)
    given = weakref.ref(theta)
    keep(context, Personal(theta, run=1))
    del theta
    assert given() is None
