"""The boundary: w comes in, a clipped gradient goes out, θ stays."""

from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import Context

from flwr_ppsgd import Order, client_app
from flwr_ppsgd.wire import GRADIENT
from tests.support.kept import kept_by
from tests.support.toy import SIZE, Floats, Toy, grid, opened, release, strategy


@dataclass
class Broken(Toy):
    """A learner with one fault."""

    fault: str = ""

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        bad = {"size": np.ones(SIZE + 1), "shape": np.ones((SIZE, 1)), "nan": np.full(SIZE, np.nan)}
        good = np.ones(SIZE)
        return {"w": (bad[self.fault[2:]], good), "t": (good, bad[self.fault[2:]])}[self.fault[0]]


@pytest.mark.parametrize("fault", ["w:size", "w:shape", "w:nan", "t:size", "t:shape", "t:nan"])
def test_a_learner_with_a_wrong_gradient_gets_one_clear_line_and_theta_stays(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    def learner(context: Context) -> Toy:  # noqa: ARG001
        return Broken(np.zeros(SIZE), fault=fault)

    on = grid(1, client_app(learner))
    ppsgd = strategy(release=release(1))
    (message,) = opened(ppsgd, on)
    (reply,) = on.send_and_receive([message])
    assert reply.error.reason == "ClientError: learner-failed: ValueError"
    assert "Broken.gradients returned" in caplog.text
    assert kept_by(on.context(message.metadata.dst_node_id)) is None


@dataclass
class Given(Toy):
    """A learner whose gradient is given."""

    gradient: Floats | None = None

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:  # noqa: ARG002
        assert self.gradient is not None
        return self.gradient, self.gradient


MASKED = np.ma.array([3.0, 4.0, 100.0, 0.0, 0.0, 0.0], mask=np.arange(SIZE) == 2)


def test_what_a_mask_hides_is_clipped_too() -> None:
    """Numpy's masked arrays leave masked numbers alone when they are multiplied."""
    on = grid(1, client_app(lambda _: Given(np.zeros(SIZE), gradient=MASKED)))
    (message,) = opened(strategy(release=release(1)), on)
    (reply,) = on.send_and_receive([message])
    sent = reply.content.array_records[GRADIENT]["0"].numpy()
    assert np.linalg.norm(sent) == pytest.approx(1.0)
    np.testing.assert_allclose(sent, MASKED.data / np.linalg.norm(MASKED.data))


def test_a_number_that_vanishes_in_clipping_is_no_error() -> None:
    """Whether it does depends on the user's data, and numpy may have been told to raise."""
    tiny = np.array([5.0, 1e-308, 0.0, 0.0, 0.0, 0.0])
    on = grid(1, client_app(lambda _: Given(np.zeros(SIZE), gradient=tiny)))
    (message,) = opened(strategy(release=release(1)), on)
    with np.errstate(all="raise"):
        (reply,) = on.send_and_receive([message])
    assert not reply.has_error()
