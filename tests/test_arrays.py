"""Numpy arrays in Flower's records, and w as named arrays."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from flwr_ppsgd.arrays import Layout, decode, encode, vector_record


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


# --- w

DTYPES: list[np.dtype[np.floating[Any]]] = [np.dtype("<f4"), np.dtype("<f8"), np.dtype(">f8")]
floats = hnp.arrays(
    dtype=st.sampled_from(DTYPES),
    shape=hnp.array_shapes(max_dims=3, max_side=5),
    elements=st.floats(-6e4, 6e4, width=16),
)


@given(st.dictionaries(st.text(min_size=1, max_size=5), floats, min_size=1, max_size=4))
def test_flatten_and_unflatten_are_inverse(arrays: dict[str, NDArray[Any]]) -> None:
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    layout = Layout.of(record)
    flat = layout.flatten(record)
    assert flat.dtype == np.float64
    np.testing.assert_array_equal(
        flat, np.concatenate([array.reshape(-1) for array in arrays.values()])
    )
    back = layout.unflatten(flat)
    for name, array in arrays.items():
        decoded = back[name].numpy()
        np.testing.assert_array_equal(decoded, array)
        assert decoded.dtype == array.dtype
        assert back[name].shape == array.shape


def test_keys_may_come_in_any_order() -> None:
    layout = Layout.of(ArrayRecord({"a": Array(np.ones(1)), "b": Array(np.zeros(1))}))
    swapped = ArrayRecord({"b": Array(np.full(1, 3.0)), "a": Array(np.full(1, 2.0))})
    assert layout.flatten(swapped).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("record", [ArrayRecord(), ArrayRecord([np.zeros(2, dtype=np.int32)])])
def test_a_w_that_cannot_take_noise_is_refused(record: ArrayRecord) -> None:
    with pytest.raises(ValueError, match="shared parameters"):
        Layout.of(record)


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="w has 2 parameters"):
        Layout.of(ArrayRecord([np.zeros(2)])).unflatten(np.zeros(3))


def test_w_is_read_as_it_was_sent_or_in_double_precision() -> None:
    own = ArrayRecord([np.arange(3.0, dtype=np.float32)])
    layout = Layout.of(own)
    assert layout.flatten(own, as_sent=True).dtype == np.float32
    assert layout.flatten(own).dtype == np.float64
    own["0"].stype = "torch"
    with pytest.raises(ValueError, match="serialised as 'torch'"):
        Layout.of(own)
