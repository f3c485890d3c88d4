"""Numpy arrays in Flower's records."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from numpy.typing import NDArray

from flwr_ppsgd.arrays import decode, decode_vector, encode, vector_record


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
        kept = decode_vector(array)
        assert kept.tolist() == [1.0] * len(kept)
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 2.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scaling_on_the_way_is_in_double_precision(dtype: type) -> None:
    values: NDArray[Any] = np.random.default_rng(0).normal(size=10_001).astype(dtype)
    scaled = decode_vector(encode(values, values.shape, np.float32, scale=1 / 3))
    expected = (values.astype(np.float64) / 3).astype(np.float32)
    np.testing.assert_allclose(scaled, expected, rtol=2**-23)
    assert scaled.dtype == np.float32


def test_a_header_with_a_truth_value_for_a_length_is_read_as_a_number() -> None:
    honest = Array(np.ones(1)).data
    lying = honest.replace(
        b"'fortran_order': False, 'shape': (1,), ", b"'fortran_order': True, 'shape':(True,),"
    )
    assert len(lying) == len(honest)
    array = Array("float64", (1,), "numpy.ndarray", lying)
    np.testing.assert_array_equal(decode("w", array, (1,)), [1.0])
