"""What is in a client's reply."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_ppsgd.arrays import vector_record
from flwr_ppsgd.secure.coordinator import SecureStage
from flwr_ppsgd.server.replies import secure_message_in
from flwr_ppsgd.wire import MASKED


def masked_vector_in(record: object) -> Any:
    """Of a reply to the third exchange of a secure sum over 4 coordinates."""
    return secure_message_in({MASKED: record}, SecureStage.MASKED, 4)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4),
        np.zeros(5, np.uint64),
        np.zeros((2, 2), np.uint64),
        np.zeros(4, np.int64),
        np.zeros(4, ">u8"),
    ],
)
def test_a_masked_vector_of_another_form_is_refused(array: NDArray[Any]) -> None:
    record = vector_record({MASKED: array})
    with pytest.raises(ValueError, match="expected 4 words"):
        masked_vector_in(record)


def test_a_masked_vector_comes_alone_and_whole() -> None:
    words = np.arange(4, dtype=np.uint64)
    record = vector_record({MASKED: words})
    assert np.array_equal(masked_vector_in(record), words)
    record[MASKED].data = record[MASKED].data[:-1]
    with pytest.raises(ValueError, match="'masked' holds 31 bytes"):
        masked_vector_in(record)
    with pytest.raises(ValueError, match="no masked vector"):
        masked_vector_in(vector_record({MASKED: words, "more": words}))
    with pytest.raises(ValueError, match="no masked vector"):
        masked_vector_in(None)
