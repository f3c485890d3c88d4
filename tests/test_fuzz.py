"""Hostile bytes, many of them: ``make fuzz`` runs these for minutes, ``make test`` for seconds."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from flwr_ppsgd.arrays import NUMPY, Layout
from flwr_ppsgd.server.store import NAME, Checkpoint, Store
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


def store_of_five_charges() -> dict[str, bytes]:
    """The files of a training by name."""
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        store.settle(delta=1e-4, release=RELEASE)
        for round_ in range(1, CHARGES + 1):
            store.charge(round_, RELEASE)
        store.save(Checkpoint(CHARGES, {"0": W["0"].data}))
        store.close()
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


STORE = store_of_five_charges()


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
def test_a_changed_store_never_shows_fewer_charges(data: st.DataObject) -> None:
    """It is refused, or it shows all of them. Nothing outside helps."""
    content = changed(data, STORE[NAME])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / NAME
        path.write_bytes(content)
        try:
            store = Store.read(Path(directory))
        except ValueError:
            return
        assert store.charge_count == CHARGES
        store.close()


@given(st.data())
def test_a_changed_w_is_refused(data: st.DataObject) -> None:
    (name,) = (name for name in STORE if name.startswith("w-"))
    content = changed(data, STORE[name])
    if content == STORE[name]:
        return
    with tempfile.TemporaryDirectory() as directory:
        for path, whole in {**STORE, name: content}.items():
            (Path(directory) / path).write_bytes(whole)
        with pytest.raises(ValueError, match="no checkpoint of w"):
            Store.read(Path(directory)).load()
