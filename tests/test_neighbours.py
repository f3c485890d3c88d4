"""The measurement beside other simulators, without them."""

import subprocess
import sys

import pytest

from simulations.benchmarks.neighbours.__main__ import OURS, SIDES, show
from tests.support.paths import ROOT

SIDE = """
from simulations.benchmarks.neighbours.serving import serve

def run(rounds):
    print("this is no answer")
    sum(range(rounds))

serve(run, "a library 1.0")
"""


def test_a_side_says_its_versions_and_then_answers_each_request_with_a_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIDE],
        input="1000\n1\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    versions, *times = done.stdout.splitlines()
    assert versions == "a library 1.0"
    assert len(times) == 2
    assert all(float(time) >= 0 for time in times)


def test_ratios_are_those_within_a_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """The ratio of the two medians would be 2."""
    other = SIDES[-1]
    speeds = [(4.0, 1.0), (2.0, 0.5), (1.0, 2.0)]
    turns = []
    for own_speed, other_speed in speeds:
        turns.append({**dict.fromkeys(OURS, own_speed), other: other_speed})
    show(turns)
    line = capsys.readouterr().out.splitlines()[-1]
    name, speed, *ratios = line.rsplit(maxsplit=4)
    assert name == other.name
    assert float(speed) == 1.0
    assert [float(ratio) for ratio in ratios] == [4.0, 4.0, 4.0]
