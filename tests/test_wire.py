"""The Order."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flwr_ppsgd import Order
from flwr_ppsgd.secure.terms import SecureTerms
from flwr_ppsgd.wire import MAY_BE_EMPTY, PROTOCOL

ORDER = Order(
    7,
    0.25,
    3.0,
    "sum",
    True,
    metrics=("loss", "accuracy"),
    training=2**62,
    starts=(1, 5, 5, 8),
    back=4,
    charges=9,
    epsilon=1.5,
    promise="(1.5, 1e-05)-joint differential privacy; ε",
    server_key="ed25519:abc",
    signature="abc=",
)


def test_every_field_but_the_visit_survives_the_wire() -> None:
    visited = replace(ORDER, visit=9)
    assert Order.from_flat(ConfigRecord(visited.to_flat())) == ORDER


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    order = Order(np.int64(7), np.float64(0.5), 3, "sum", True)  # type: ignore[arg-type]
    flat = Order.from_flat(order.to_flat()).to_flat()
    assert [type(flat[name]) for name in ("round", "step", "clip_norm")] == [int, float, float]


MALFORMED: dict[str, list[Any]] = {
    "round": [1.5, True, -1, "1", 2**60],
    "step": [-0.1, math.nan, math.inf, 1, [0.5]],
    "clip_norm": [math.inf, 0.0, math.nan],
    "reduction": ["max"],
    "publishes": [1],
    "average": ["yes"],
    "metrics": ["loss,,accuracy", "loss,loss", "lo\x1b[2Jss", "a" * 300],
    "training": [-1, 2**63 + 1, 1.0],
    "starts": ["1,x", "1,-3", "01", "1, 3", "1,99", "9" * 400],
    "sparse": [-1, "3-5"],
    "stage": [2],
    "back": [-1, True],
    "charges": [False, -1, None],
    "epsilon": [-1.0, math.nan],
    "promise": ["a\x1b[31mb", "two\nlines", "left\u202eright", "a" * 1001],
    "server_key": ["a" * 1001],
    "signature": [b"bytes"],
    "protocol": [1, True, 2.0],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_order_is_refused_in_one_clean_line(name: str) -> None:
    for value in MALFORMED[name]:
        with pytest.raises(ValueError, match=name) as refused:
            Order.from_flat({**ORDER.to_flat(), name: value})
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 250


@pytest.mark.parametrize("name", sorted(set(ORDER.to_flat()) - set(MAY_BE_EMPTY)))
def test_an_order_without_a_field_is_refused(name: str) -> None:
    flat = ORDER.to_flat()
    del flat[name]
    with pytest.raises(ValueError, match=name):
        Order.from_flat(flat)


def test_empty_texts_are_left_out_of_an_order() -> None:
    """Flower's size mods reject a record with an empty text."""
    bare = Order(1, 0.5, 1.0, "mean", True)
    assert "" not in bare.to_flat().values()
    assert Order.from_flat(bare.to_flat()) == bare


def test_an_order_with_a_field_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="no unknown field, got \\['visit'\\]"):
        Order.from_flat({**ORDER.to_flat(), "visit": 3})


TERMS = SecureTerms(100, 3.0, 1.5, 70, 5, 2.0**-40, 0, 0.1, "2.5")
SUMMED: dict[str, Any] = {"stage": 3, "payload": "ab" * 32, "plan": {"gradient": (1.0, 9)}}
SECURE = replace(ORDER, metrics=("loss",), terms=TERMS, **SUMMED)


def test_the_terms_of_a_secure_sum_survive_the_wire() -> None:
    assert Order.from_flat(ConfigRecord(SECURE.to_flat())) == SECURE
    without_measures = replace(TERMS, bounds="", share=0.0)
    bare = replace(SECURE, payload="", metrics=(), terms=without_measures)
    assert "" not in bare.to_flat().values()
    assert Order.from_flat(bare.to_flat()) == bare


MALFORMED_TERMS: dict[str, list[Any]] = {
    "stage": [5, -1, True],
    "plan": [
        *("gradient=-1.0:9", "gradient=nan:9", "gradient=1.0:0"),
        *("all=1.0:1", "unit=1.0:1,unit=1.0:1", "unit=1e+400:1"),
    ],
    "payload": ["a" * 500],
    "secure_honest": [1, 101, 70.0],
    "secure_colluding": [-1],
    "secure_population": [0, 2**60],
    "secure_clip_norm": [math.inf, math.nan],
    "secure_noise_multiplier": [-1.0, math.nan, 1e-5],
    "secure_failure": [0.5],
    "secure_neighbours": [-1],
    "secure_normalise": [True],
    "secure_share": [1.5],
    "secure_bounds": ["2.5,3.5", "nan", "many", ""],
}


@pytest.mark.parametrize("name", MALFORMED_TERMS)
def test_malformed_terms_are_refused_in_one_clean_line(name: str) -> None:
    for value in MALFORMED_TERMS[name]:
        with pytest.raises(ValueError, match="Order") as refused:
            Order.from_flat({**SECURE.to_flat(), name: value})
        assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "name", sorted(set(SECURE.to_flat()) - set(ORDER.to_flat()) - {"payload", "plan"})
)
def test_an_order_with_half_of_its_terms_is_refused(name: str) -> None:
    flat = SECURE.to_flat()
    del flat[name]
    with pytest.raises(ValueError, match="Order"):
        Order.from_flat(flat)


numbers = st.one_of(st.integers(), st.floats(), st.lists(st.integers(), max_size=3))
others = st.one_of(st.none(), st.booleans(), st.text(max_size=30), st.binary(max_size=10))
scalars = st.one_of(numbers, others)


@pytest.mark.fuzz
@given(st.dictionaries(st.sampled_from(sorted(ORDER.to_flat())), scalars, max_size=4))
@example({"starts": "1,٣"})
@settings(deadline=None)
def test_whatever_comes_is_an_order_that_is_sound_or_a_value_error(changes: dict[str, Any]) -> None:
    try:
        order = Order.from_flat({**ORDER.to_flat(), **changes})
    except ValueError as refused:
        assert str(refused).isprintable()  # noqa: PT017
        return
    assert order.protocol == PROTOCOL
    assert 0 <= order.step < math.inf
    assert 0 < order.clip_norm < math.inf
    assert order.reduction in ("mean", "sum")
    assert all(type(start) is int and start > 0 for start in order.starts)
    assert order.promise.isprintable()
    assert type(order.round) is int
    given = {**ORDER.to_flat(), **changes}
    assert order.to_flat() == {name: value for name, value in given.items() if value != ""}
