"""What ``ppsgd client-report`` says."""

from dataclasses import replace
from pathlib import Path

from flwr_ppsgd import client_app
from flwr_ppsgd.client.report import client_report
from tests.client.test_policy import message
from tests.client.test_theta_store import Nodes, order
from tests.support.toy import release, strategy, toy_learner, w0


def test_the_report_says_what_left_and_what_is_promised(tmp_path: Path) -> None:
    strategy(release=release(z=5.0), evaluate_every=0).start(Nodes(tmp_path), w0(), num_rounds=4)
    text = client_report(tmp_path)
    assert text.count("took part in 4 rounds; the last one was round 4") == 5
    sent = 4 * len(w0()["0"].data)
    assert f"{sent:,} bytes of gradient; 4 replies in 1 Flower runs" in text
    assert "nothing but the clipped gradient; its norm was" in text
    assert "1 at most, clipped to 1" in text
    assert "over 4 planned rounds for each of 5 users, user-level joint differential" in text
    assert "privacy; the server is trusted" in text


def test_the_report_names_metrics_that_left(tmp_path: Path) -> None:
    strategy(evaluate_every=1).start(Nodes(tmp_path), w0(), num_rounds=1)
    assert "bytes of metrics" in client_report(tmp_path)
    assert "the clipped gradient, and more" in client_report(tmp_path)


def test_control_characters_never_reach_the_report(tmp_path: Path) -> None:
    """A server may choose its promise; an Order with such a character is refused, a letter not."""
    context = Nodes(tmp_path, nodes=1, run="a\x1b[2Jb").context(1_000_000)
    client_app(toy_learner)(message(replace(order(1), promise="all is well")), context)
    text = client_report(tmp_path)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "all is well" in text
