"""Exceptions are messages: Flower sends their text, so ours say a code and nothing else."""

import builtins
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.client_app import ClientAppException

from flwr_ppsgd import Order, client_app
from flwr_ppsgd.client.refusal import ClientError, RefusalCode, RefusedError, error_for_server
from tests.client.test_policy import ORDER, by_legacy, by_message, context, message
from tests.support.toy import SIZE, Floats, Toy, w0

SECRET = "diagnosis: pneumonia"
THETA = np.arange(1.0, SIZE + 1) / 7


class Pneumonia(Exception):  # noqa: N818
    """A name that a learner chose."""


class Talkative(Toy):
    """A learner that tells what it knows when it fails."""

    def initial_theta(self) -> Floats:
        return THETA

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        try:
            raise KeyError(SECRET, theta.tobytes())
        except KeyError as error:
            raise Pneumonia(SECRET, theta.tolist()) from error

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:  # noqa: ARG002
        raise Pneumonia(SECRET, theta.tobytes())


def talkative(on: Context) -> Toy:  # noqa: ARG001
    return Talkative(np.zeros(SIZE))


def not_even_built(on: Context) -> Toy:  # noqa: ARG001
    raise Pneumonia(SECRET, THETA.tobytes())


def replies_with_an_error(
    asked: Message, on: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    call_next(asked, on)
    return Message(Error(5, SECRET), reply_to=asked)


def raises(asked: Message, on: Context, call_next: Callable[[Message, Context], Message]) -> Any:
    call_next(asked, on)
    raise ValueError(SECRET)


def honest(on: Context) -> Toy:  # noqa: ARG001
    return Toy(np.zeros(SIZE))


APPS = {
    "learner": client_app(talkative),
    "learner_for": client_app(not_even_built),
    "mod": client_app(honest, mods=[raises]),
    "error of a mod": client_app(honest, mods=[replies_with_an_error]),
}


def told_by(error: BaseException) -> list[str]:
    """All that Flower makes of an exception: in a deployment (flwr-clientapp), in Ray's actor, and
    by pickling."""
    deployment = str(type(error)) + ":<'" + str(error) + "'>"
    try:
        raise ClientAppException(str(error)) from error
    except ClientAppException as wrapped:
        actor = "".join(traceback.format_exception(wrapped))
    again = pickle.loads(pickle.dumps(error))
    chain = [error.__cause__, error.__context__, again.__cause__, again.__context__]
    return [deployment, actor, repr(error), repr(error.__dict__), str(again), repr(chain)]


def leaks(text: str) -> bool:
    numbers = [repr(THETA.tobytes())[2:-1], str(THETA.tolist()[0])]
    return any(secret in text for secret in [SECRET, "pneumonia", "Pneumonia", *numbers])


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("what", APPS)
def test_neither_theta_nor_a_learners_words_are_in_an_error(
    what: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ClientError) as failed:
        APPS[what](message(ORDER, kind), context())
    assert not [text for text in told_by(failed.value) if leaks(text)]
    assert failed.value.code == "learner-failed"
    assert SECRET in caplog.text, "the full text is in this machine's log"


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_the_legacy_client_tells_no_more(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.client.test_policy.toy_learner", talkative)
    with pytest.raises(ClientError) as failed:
        by_legacy(context(), ORDER, kind)
    assert not [text for text in told_by(failed.value) if leaks(text)]
    assert SECRET in caplog.text


def test_an_error_says_a_code_and_a_class_of_pythons_own() -> None:
    class ValueError(Exception):
        """Not Python's."""

    assert str(error_for_server(builtins.ValueError(SECRET))) == "learner-failed: ValueError"
    assert str(error_for_server(ValueError(SECRET))) == "learner-failed: Exception"
    assert str(error_for_server(Pneumonia(SECRET))) == "learner-failed: Exception"
    assert str(error_for_server(UnicodeDecodeError("a", b"b", 1, 2, "c"))) == (
        "learner-failed: UnicodeDecodeError"
    )
    unknown: Any = SECRET
    assert str(error_for_server(RefusedError(unknown, SECRET))) == "learner-failed: ValueError"
    for code in RefusalCode:
        assert str(error_for_server(RefusedError(code, SECRET))) == f"{code}: ValueError"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through_and_theta_stays(stop: type[BaseException]) -> None:
    class Interrupted(Toy):
        def gradients(self, w: Floats, theta: Floats, order: Order) -> Any:  # noqa: ARG002
            raise stop

    on = context()
    with pytest.raises(stop):
        client_app(lambda _: Interrupted(np.zeros(SIZE)))(message(ORDER), on)
    assert not on.state


def test_an_error_that_cannot_be_noted_is_still_only_a_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    on = context(state_dir=str(blocked / "states"))
    with pytest.raises(ClientError, match=r"^disk: ValueError$"):
        by_message(on, ORDER, "train")
    assert "could not be noted" in caplog.text
    assert not on.state


def test_a_message_that_nobody_serves_is_an_error_too() -> None:
    with pytest.raises(ClientError, match=r"^learner-failed: ValueError$"):
        client_app(honest)(Message(RecordDict({"other": w0()}), 5, "query.other"), context())
