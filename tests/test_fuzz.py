"""Hostile bytes, many of them: ``make fuzz`` runs these for minutes, ``make test`` for seconds."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from flwr_ppsgd.arrays import NUMPY
from flwr_ppsgd.server.checkpoint import Checkpoint
from flwr_ppsgd.server.journal import NAME, Journal, read_story
from flwr_ppsgd.wire import Layout
from tests.support.toy import release, w0

pytestmark = pytest.mark.fuzz
RELEASE = release(z=1.0)
CHARGES = 5
W = w0()
LAYOUT = Layout.of(W)


def changed(data: st.DataObject, content: bytes) -> bytes:
    """A few bytes replaced, cut or inserted somewhere."""
    place = data.draw(st.integers(0, len(content)))
    put = data.draw(st.binary(max_size=6))
    gone = data.draw(st.integers(0, 6))
    return content[:place] + put + content[place + gone :]


def journal_of_five_charges() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        journal = Journal(Path(directory), RELEASE, 1e-4)
        journal.begin(1)
        for round_ in range(1, CHARGES + 1):
            journal.charge(round_, insecure=False)
        journal.close()
        return (Path(directory) / NAME).read_bytes()


JOURNAL = journal_of_five_charges()


@given(st.data())
def test_a_changed_array_is_floats_of_the_right_shape_or_a_value_error(data: st.DataObject) -> None:
    content = changed(data, W["0"].data)
    record = ArrayRecord()
    record["0"] = Array("float64", (6,), NUMPY, content)
    try:
        vector = LAYOUT.flatten(record)
    except ValueError:
        return
    assert vector.shape == (LAYOUT.size,)
    assert vector.dtype == np.float64


@given(st.data())
def test_a_changed_journal_never_shows_fewer_charges(data: st.DataObject) -> None:
    """It is refused, or it tells all of them.

    Only what is cut off at the end of the file is lost, and the outside record is there for that.
    """
    content = changed(data, JOURNAL)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / NAME
        path.write_bytes(content)
        try:
            story = read_story(Path(directory))
        except ValueError:
            return
        lines = content.count(b"\n")
        cut_off = JOURNAL.count(b"\n") - lines
    charged = sum(story.counts.values())
    assert charged >= CHARGES - max(cut_off, 0)


@given(st.data())
def test_a_changed_checkpoint_is_refused(data: st.DataObject) -> None:
    whole = b"".join(Checkpoint(3, {"0": W["0"].data}, 3).to_parts())
    content = changed(data, whole)
    if content == whole:
        return
    with pytest.raises(ValueError, match="checksum"):
        Checkpoint.from_bytes(content)
