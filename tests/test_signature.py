"""Orders are signed: every field, and every byte of w."""

from dataclasses import replace
from typing import Any

import pytest

from flwr_ppsgd import Order
from flwr_ppsgd.signature import TrainingKey, digest, signed_order
from flwr_ppsgd.signature import verify as verify_for
from tests.test_wire import ORDER, SECURE

W = {"0": b"first array", "1": b"second"}
KEY = TrainingKey.new()
FULL = replace(SECURE, task="classification", sparse=2, variance=(0.5,))  # no field empty
TRAIN: dict[str, Any] = {"kind": "train", "run": 3}


def sign(order: Order, key: TrainingKey = KEY) -> dict[str, Any]:
    return signed_order(order, digest(W), key, **TRAIN)


def verify(order: Order, arrays: dict[str, bytes], key: str, **other: Any) -> bool:
    return verify_for(order, arrays, key, **{**TRAIN, **other})


SIGNED = Order.from_flat(sign(FULL))

OTHER: dict[str, Any] = {
    "round": 8,
    "step": 0.5,
    "clip_norm": 4.0,
    "reduction": "mean",
    "publishes": False,
    "asks": "solution",
    "task": "regression",
    "sparse": 3,
    "unit": 2.0,
    "size": 3.0,
    "variance": bytes(8),
    "last": True,
    "average": True,
    "metrics": "accuracy",
    "training": 5,
    "starts": "1,5,5,7",
    "back": 5,
    "charges": 10,
    "epsilon": 1.0,
    "plan": "gradient=2.0:9",
    "sampled": True,
    "promise": "everything",
    "stage": 2,
    "payload": "cd",
    "secure_population": 101,
    "secure_clip_norm": 2.0,
    "secure_noise_multiplier": 1.6,
    "secure_honest": 71,
    "secure_colluding": 6,
    "secure_failure": 2.0**-41,
    "secure_neighbours": 1,
    "secure_share": 0.2,
    "secure_bounds": "2.6",
}


def test_a_signed_order_is_accepted_after_the_wire() -> None:
    assert verify(Order.from_flat(SIGNED.to_flat()), W, KEY.public)


def test_the_list_of_fields_is_complete() -> None:
    assert {*OTHER, "server_key", "signature", "protocol"} == set(SIGNED.to_flat())


@pytest.mark.parametrize("name", OTHER)
def test_a_change_of_any_field_shows(name: str) -> None:
    changed = Order.from_flat({**SIGNED.to_flat(), name: OTHER[name]})
    assert not verify(changed, W, KEY.public)


@pytest.mark.parametrize(
    "arrays",
    [
        {"0": b"first array", "1": b"Second"},
        {"1": b"second", "0": b"first array"},
        {"0": b"first array", "2": b"second"},
        {"0": b"first array"},
        {"0": b"first array1", "1": b"second"},
        {},
    ],
)
def test_a_change_of_w_shows(arrays: dict[str, bytes]) -> None:
    assert digest(arrays) != digest(W)
    assert not verify(SIGNED, arrays, KEY.public)


@pytest.mark.parametrize("other", [{"kind": "evaluate"}, {"kind": "query"}, {"run": 4}])
def test_a_signature_is_for_one_type_of_message_in_one_run(other: dict[str, Any]) -> None:
    assert not verify(SIGNED, W, KEY.public, **other)


def test_unsigned_orders_and_those_of_another_key_are_not_accepted() -> None:
    foreign = TrainingKey.new()
    assert not verify(ORDER, W, KEY.public)
    assert not verify(Order.from_flat(sign(ORDER, foreign)), W, KEY.public)
    claimed = Order.from_flat({**sign(ORDER, foreign), "server_key": KEY.public})
    assert not verify(claimed, W, KEY.public)
    for nonsense in ("", "====", "ä", "YWJj"):
        assert not verify(
            Order.from_flat({**SIGNED.to_flat(), "signature": nonsense}), W, KEY.public
        )


def test_the_private_half_is_not_shown() -> None:
    assert KEY.public.startswith("ed25519:")
    assert "private" not in repr(KEY)
