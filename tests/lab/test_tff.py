"""The messages in TensorFlow Federated's files."""

import numpy as np
import pytest

from flwr_ppsgd.lab.tff import parse_example
from tests.support.tff_files import example


def test_messages_are_read_as_protobuf_wrote_them() -> None:
    floats = [0.0, -1.5, 3.25e-20, 1e30]
    whole = [0, 1, -1, 127, 128, 300, 2**62, -(2**63)]
    texts = [b"", "äö".encode(), b"x" * 300]
    found = parse_example(example({"f": floats, "i": whole, "b": texts, "0": []}))
    np.testing.assert_array_equal(found["f"], np.array(floats, dtype=np.float32))
    assert (found["i"], found["b"], found["0"]) == (whole, texts, [])


def test_a_message_cut_short_is_refused() -> None:
    whole = example({"pixels": [0.5] * 20, "label": [3]})
    for length in (1, 5, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match=r"tf\.train\.Example"):
            parse_example(whole[:length])
