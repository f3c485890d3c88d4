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

TEXTS: dict[str, Any] = {"reduction": "mean", "asks": "solution", "task": "regression"}
TEXTS |= {"metrics": "accuracy", "starts": "1,5,5,7", "plan": "gradient=2.0:9", "payload": "cd"}
TEXTS |= {"promise": "everything", "secure_bounds": "2.6", "variance": bytes(8)}
SIGNERS = {"server_key", "signature", "protocol"}


def another(name: str) -> Any:
    """Another value of a field, which an Order may have too."""
    value = SIGNED.to_flat()[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if name != "stage" else value - 1
    return value / 2 if isinstance(value, float) else TEXTS[name]


def test_a_signed_order_is_accepted_after_the_wire() -> None:
    assert verify(Order.from_flat(SIGNED.to_flat()), W, KEY.public)


@pytest.mark.parametrize("name", sorted(SIGNED.to_flat().keys() - SIGNERS))
def test_a_change_of_any_field_shows(name: str) -> None:
    changed = Order.from_flat({**SIGNED.to_flat(), name: another(name)})
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
