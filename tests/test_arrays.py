"""Numpy arrays in Flower's records: when they become bytes, and what another process gets."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_ppsgd.arrays import (
    HeldArray,
    decode,
    decode_vector,
    encode,
    header_of,
    note_on,
    numbers,
    unchanging,
    vector_record,
)


def held(values: NDArray[Any]) -> Array:
    return encode(values.reshape(-1), values.shape, values.dtype)


VALUES = np.arange(6.0).reshape(2, 3)
WORDS = np.dtype(np.uint64)


def noted() -> Array:
    return HeldArray.later(lambda: np.arange(3, dtype=WORDS), 3, WORDS, note="a note")


def test_an_array_that_is_only_read_here_is_never_serialised() -> None:
    array = held(VALUES)
    np.testing.assert_array_equal(decode("w", array, (2, 3)), VALUES.reshape(-1))
    assert "data" not in array.__dict__
    assert type(array) is HeldArray


def test_whoever_asks_for_bytes_gets_flowers_own() -> None:
    array = held(VALUES)
    theirs = Array(VALUES)
    assert array.data == theirs.data
    assert type(array) is Array
    assert "values" not in array.__dict__  # the numbers are held once
    assert array.deflate() == theirs.deflate()
    np.testing.assert_array_equal(array.numpy(), VALUES)


def test_its_name_on_the_wire_is_flowers() -> None:
    """``deflate`` writes the name of the class, which the receiver looks up."""
    assert held(VALUES).deflate() == Array(VALUES).deflate()
    assert held(VALUES).object_id == Array(VALUES).object_id


@pytest.mark.parametrize("copied", [lambda a: pickle.loads(pickle.dumps(a)), copy.deepcopy])
def test_another_process_gets_flowers_own_class(copied: Any) -> None:
    for array, theirs in [(held(VALUES), VALUES), (noted(), np.arange(3, dtype=WORDS))]:
        other = copied(array)
        assert type(other) is Array
        assert other == Array(theirs)
        assert set(other.__dict__) <= set(Array(VALUES).__dict__)


def test_it_equals_flowers_array_of_the_same_numbers() -> None:
    assert held(VALUES) == Array(VALUES)
    assert Array(VALUES) == held(VALUES)
    assert ArrayRecord({"w": held(VALUES)}) == ArrayRecord({"w": Array(VALUES)})
    assert held(VALUES) != held(VALUES + 1)
    assert not held(VALUES).__eq__("something else")


def test_what_its_maker_does_afterwards_changes_nothing() -> None:
    mine = np.ones(4)
    record = vector_record({"theta": mine, "part": mine[:2]})
    mine[:] = 7.0
    for array in record.values():
        kept = decode_vector(array)
        assert kept.tolist() == [1.0] * len(kept)
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 2.0


def test_what_nobody_can_change_is_not_copied() -> None:
    mine = unchanging(np.ones(4))
    assert decode_vector(vector_record({"theta": mine})["theta"]) is mine


def test_bytes_that_are_put_in_later_count() -> None:
    """A mod may write into an array: what it wrote is what is read."""
    array = held(VALUES)
    array.data = Array(VALUES + 1).data
    np.testing.assert_array_equal(decode("w", array, (2, 3)), VALUES.reshape(-1) + 1)
    assert header_of("w", array).end > 0
    stamp = noted()
    stamp.data = Array(np.ones(3, dtype=WORDS)).data
    assert note_on(stamp) is None
    assert decode_vector(stamp).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scaling_on_the_way_is_in_double_precision(dtype: type) -> None:
    values: NDArray[Any] = np.random.default_rng(0).normal(size=10_001).astype(dtype)
    scaled = decode_vector(encode(values, values.shape, np.float32, scale=1 / 3))
    expected = (values.astype(np.float64) / 3).astype(np.float32)
    np.testing.assert_allclose(scaled, expected, rtol=2**-23)
    assert scaled.dtype == np.float32


def test_a_vector_for_later_is_made_when_it_is_read() -> None:
    made = []

    def make() -> NDArray[Any]:
        made.append(1)
        return np.arange(3, dtype=np.uint64)

    array = HeldArray.later(make, 3, WORDS, note="a note")
    assert note_on(array) == "a note"
    assert not made
    assert decode_vector(array).tolist() == [0, 1, 2]
    assert array == Array(np.arange(3, dtype=np.uint64))
    assert type(array) is Array
    assert set(array.__dict__) <= set(Array(VALUES).__dict__)


def test_an_array_that_becomes_bytes_between_two_looks_is_read() -> None:
    """Another thread may ask for its bytes at any time."""
    array = held(VALUES)
    header = header_of("w", array)
    assert array.data
    np.testing.assert_array_equal(numbers("w", array, header), VALUES.reshape(-1))


def test_a_header_with_a_truth_value_for_a_length_is_read_as_a_number() -> None:
    honest = Array(np.ones(1)).data
    lying = honest.replace(
        b"'fortran_order': False, 'shape': (1,), ", b"'fortran_order': True, 'shape':(True,),"
    )
    assert len(lying) == len(honest)
    array = Array("float64", (1,), "numpy.ndarray", lying)
    np.testing.assert_array_equal(decode("w", array, (1,)), [1.0])
