"""Numpy arrays in Flower's records."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from numpy.typing import NDArray

from flwr_ppsgd.arrays import decode, encode, vector_record


def serialised(values: NDArray[Any]) -> Array:
    return encode(values.reshape(-1), values.shape, values.dtype)


VALUES = np.arange(6.0).reshape(2, 3)


def test_its_bytes_and_its_name_on_the_wire_are_flowers() -> None:
    assert serialised(VALUES) == Array(VALUES)
    assert serialised(VALUES).deflate() == Array(VALUES).deflate()
    assert serialised(VALUES).object_id == Array(VALUES).object_id


def test_what_its_maker_does_afterwards_changes_nothing() -> None:
    mine = np.ones(4)
    record = vector_record({"theta": mine, "part": mine[:2]})
    mine[:] = 7.0
    for array in record.values():
        kept = decode(array)
        assert kept.tolist() == [1.0] * len(kept)
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 2.0


def test_a_header_with_a_truth_value_for_a_length_is_read_as_a_number() -> None:
    honest = Array(np.ones(1)).data
    lying = honest.replace(
        b"'fortran_order': False, 'shape': (1,), ", b"'fortran_order': True, 'shape':(True,),"
    )
    assert len(lying) == len(honest)
    array = Array("float64", (1,), "numpy.ndarray", lying)
    np.testing.assert_array_equal(decode(array), [1.0])
