"""The audit acquits the real mechanism and convicts each broken one."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd import PPSGD, FixedSize, Ledger, Poisson, Release, SecureSum, Steps
from flwr_ppsgd.algorithm import PrivateMetrics
from flwr_ppsgd.audit import OWN_NOISE, Audit, audit
from flwr_ppsgd.cli import app
from flwr_ppsgd.noise import AT_ONCE, GridSum, RandomStream
from flwr_ppsgd.server.account import ServerAccount
from flwr_ppsgd.server.rounds import OpenSum, SumRequest

SIZE = 4000
LONG = 60_000  # more than three blocks of the generator
HUNDRED = Release(Poisson(100, 1.0), clip_norm=2.0, noise_multiplier=1.0)
FEW = Release(Poisson(30, 1.0), 2.0, 0.5, aggregation=SecureSum(honest=22, colluding=2))


@pytest.fixture(autouse=True)
def few_rounds_of_secure_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_ppsgd.audit.MOST_PAIRS", 12_000)


def make(release: Release = HUNDRED, seed: int | None = 1) -> Callable[[], PPSGD]:
    return lambda: PPSGD(release=release, steps=Steps(0.3, 0.1), delta=1e-5, insecure_seed=seed)


def audited(release: Release = HUNDRED, seed: int | None = 1, size: int = SIZE) -> Audit:
    return audit(make(release, seed), planned_rounds=50, size=size)


@pytest.mark.parametrize(
    "release",
    [
        HUNDRED,
        Release(Poisson(1000, 0.1), 0.01, 2.0),
        Release(FixedSize(300, 60), 10.0, 0.5),
        Release(Poisson(200, 1.0), 1.0, 3.0),
        Release(Poisson(200, 0.5), 1.0, 1.0, total_batch=2000),
    ],
)
def test_the_real_mechanism_conforms(release: Release) -> None:
    found = audited(release, seed=7)
    assert found.verdict == "conforms", found.in_words()
    assert found.noise_multiplier.value == pytest.approx(release.noise_multiplier, rel=0.05)
    assert found.epsilon_measured == pytest.approx(found.epsilon_charged, rel=0.15)


@pytest.mark.parametrize("release", [FEW, HUNDRED], ids=["secure", "plain"])
def test_canaries_with_an_epsilon_of_their_own_show_z_over_f(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of them, with f = ½, for whom the same noise counts twice."""
    found = audited(release, size=2000)
    own = found.estimates[OWN_NOISE]
    assert found.verdict == "conforms", found.in_words()
    assert own.expected == pytest.approx(2 * found.noise_multiplier.expected)
    assert own.error < 0.2 * own.expected
    monkeypatch.setattr("flwr_ppsgd.client.account.factor_of", lambda *_: 1.0)
    forgetful = audited(release, size=2000)
    assert any(OWN_NOISE in line for line in forgetful.findings), forgetful.in_words()


def test_too_few_users_for_the_noise_are_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_ppsgd.audit.MOST_ROUNDS", 100)
    found = audited(Release(Poisson(20, 0.2), 1.0, 50.0))
    assert found.verdict == "inconclusive"
    assert "inconclusive" in found.in_words()
    assert "audit with a larger population" in found.in_words()


def shaped_noise(shape: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        normals = RandomStream.normals
        patch.setattr(RandomStream, "normals", lambda self, count: shape(normals(self, count)))

    return apply


def missing_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("flwr_ppsgd.noise.clip_scale", lambda *_: 1.0)


def divided_by_the_number_received(patch: pytest.MonkeyPatch) -> None:
    close = OpenSum.close

    def wrong(self: Any, stream: RandomStream) -> Any:
        return close(self, stream) * self.request.release.denominator / max(1, self._used)

    patch.setattr(OpenSum, "close", wrong)


def reused_noise(patch: pytest.MonkeyPatch) -> None:
    same = "flwr_ppsgd.server.curator.random_stream"
    patch.setattr(same, lambda _, purpose, __: RandomStream.insecure(0, purpose))


def one_scalar_for_all(patch: pytest.MonkeyPatch) -> None:
    normals = RandomStream.normals
    patch.setattr(RandomStream, "normals", lambda self, count: np.full(count, normals(self, 1)[0]))


def nothing_on_empty_rounds(patch: pytest.MonkeyPatch) -> None:
    noisy = GridSum.noisy

    def wrong(self: Any, stream: RandomStream) -> Any:
        return noisy(self, stream) if np.any(self.multiples) else np.zeros(len(self.multiples))

    patch.setattr(GridSum, "noisy", wrong)


def uncharged_rounds(patch: pytest.MonkeyPatch) -> None:
    charge = ServerAccount.charge

    def wrong(self: Any, request: SumRequest) -> None:
        if request.round % 3:
            charge(self, request)

    patch.setattr(ServerAccount, "charge", wrong)


def charged_for_more_noise(patch: pytest.MonkeyPatch) -> None:
    charge = ServerAccount.charge

    def wrong(self: Any, request: SumRequest) -> None:
        release = request.release
        louder = replace(release, noise_multiplier=10 * release.noise_multiplier)
        charge(self, replace(request, release=louder))

    patch.setattr(ServerAccount, "charge", wrong)


def one_silent_coordinate(n: Any) -> Any:
    n[7] = 0.0
    return n


def reused_every_second_round(patch: pytest.MonkeyPatch) -> None:
    same = "flwr_ppsgd.server.curator.random_stream"
    patch.setattr(same, lambda _, purpose, round_: RandomStream.insecure(round_ % 2, purpose))


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "noise / 1.1": (shaped_noise(lambda n: n / 1.1), "noise multiplier"),
    "noise / 4": (shaped_noise(lambda n: n / 4), "noise multiplier"),
    "missing clip": (missing_clip, "gain"),
    "division by the number received": (divided_by_the_number_received, "gain"),
    "reused noise": (reused_noise, "1 rounds and 0 coordinates"),
    "one scalar for all coordinates": (one_scalar_for_all, "0 rounds and 1 coordinates"),
    "no noise on an empty round": (nothing_on_empty_rounds, "empty rounds"),
    "uncharged rounds": (uncharged_rounds, "the ledger holds"),
    "charged for more noise": (charged_for_more_noise, "the ledger holds"),
    "coin flips": (shaped_noise(np.sign), "kurtosis"),
    "uniform noise": (shaped_noise(lambda n: math.sqrt(12) * ((n * 1e6) % 1 - 0.5)), "kurtosis"),
    "the second half repeats the first": (
        shaped_noise(lambda n: np.tile(n[: len(n) // 2], 2)),
        "0 rounds and 2000 coordinates",
    ),
    "one silent coordinate": (shaped_noise(one_silent_coordinate), "so little noise"),
    "noise reused every second round": (reused_every_second_round, "2 rounds and 0 coordinates"),
}


def long_noise(shape: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Leaves the draws inside the generator alone."""
    return shaped_noise(lambda n: shape(n) if len(n) == LONG else n)


def quiet_stretch(n: Any) -> Any:
    """Half the noise in one stretch; the rest is a bit louder, so that the whole stays the same."""
    n[40_000:42_000] *= 0.5
    return n * math.sqrt(LONG / (LONG - 1500))


BROKEN_BLOCKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "the last block repeats the first": (
        long_noise(lambda n: np.append(n[: 3 * AT_ONCE], n[: LONG - 3 * AT_ONCE])),
        "distance of 0 rounds and 49152 coordinates",
    ),
    "a stretch with half the noise": (long_noise(quiet_stretch), "a stretch of one round"),
}


@pytest.mark.parametrize("kind", [*BROKEN, *BROKEN_BLOCKS])
def test_a_broken_mechanism_is_convicted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every block of the noise."""
    break_it, finding = {**BROKEN, **BROKEN_BLOCKS}[kind]
    break_it(monkeypatch)
    found = audited(size=LONG if kind in BROKEN_BLOCKS else SIZE)
    assert found.verdict == "convicted"
    assert any(finding in line for line in found.findings), found.in_words()


def test_a_budget_ends_the_audit_early_and_not_with_an_exception() -> None:
    release = Release(Poisson(100, 0.1), 1.0, 5.0)
    planned = Ledger(1e-5).record(release, 30).epsilon()

    def limited() -> PPSGD:
        return PPSGD(release=release, steps=Steps(0.3, 0.1), delta=1e-5, max_epsilon=planned)

    assert audit(limited, planned_rounds=30, size=SIZE).rounds == 30


def test_there_is_nothing_to_audit_without_a_release_or_noise() -> None:
    with pytest.raises(ValueError, match="nothing to audit"):
        audited(Release(Poisson(10, 1.0), 1.0, 0.0))
    with pytest.raises(ValueError, match="nothing to audit"):
        audit(lambda: PPSGD(release=HUNDRED, steps=Steps(0.0, 0.1), delta=1e-5), planned_rounds=5)


def test_other_ways_to_reply_are_audited_too() -> None:
    """Clients that return parameters, and private measures that take a share of the clip norm."""
    settings: dict[str, Any] = {"release": HUNDRED, "steps": Steps(0.3, 0.1), "delta": 1e-5}
    settings["insecure_seed"] = 3
    for more in ({"replies": "parameters"}, {"metrics": PrivateMetrics({"loss": 1.0}, share=0.3)}):
        found = audit(lambda more=more: PPSGD(**settings, **more), planned_rounds=5, size=SIZE)  # type: ignore[misc]
        assert found.verdict == "conforms", found.in_words()
    with pytest.raises(ValueError, match="without enrolled"):
        audit(lambda: PPSGD(**settings, enrolled=range(1, 101)), planned_rounds=5)


def test_standard_errors_are_honest() -> None:
    """Over 12 audits the estimates scatter as their standard errors say: χ² of 12 within 5
    standard deviations."""
    release = replace(HUNDRED, cohort=Poisson(40, 1.0))
    found = [
        audit(make(release, seed), planned_rounds=5, size=1000, seed=seed) for seed in range(12)
    ]
    for name in found[0].estimates:
        of_each = [each.estimates[name] for each in found]
        squares = [((one.value - one.expected) / one.error) ** 2 for one in of_each]
        assert abs(sum(squares) - 12) < 5 * math.sqrt(24), name


def test_the_command_audits_settings_that_name_an_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its rounds may be more than those that the ε pays for, and nobody's budget is charged."""
    caplog.set_level("ERROR", logger="flwr")  # as the command does, which would leave it so
    budget = tmp_path / "budget"
    given = ["epsilon=2.0", "population=500", "rounds=5", f"budget-dir={budget}"]
    options = [word for setting in given for word in ("--set", setting)]
    app(["audit", *options], standalone_mode=False)
    assert "Verdict: conforms" in capsys.readouterr().out
    assert not budget.exists()


def test_a_secure_sum_conforms() -> None:
    """Its canaries go through the clients' own bound; the noise is that of the 24 in the sum."""
    found = audited(FEW, size=2000)
    assert found.verdict == "conforms", found.in_words()
    expected = FEW.noise_multiplier * math.sqrt(24 / 22)
    assert found.noise_multiplier.value == pytest.approx(expected, rel=0.05)
    assert found.epsilon_measured == pytest.approx(found.epsilon_charged, rel=0.15)
    assert found.charged == ((FEW, found.rounds),)


def less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Release.share_std.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Release, "share_std", property(lambda self: whole(self) / 1.1))


def no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_ppsgd.algorithm.clip_scale", lambda *_: 1.0)
    monkeypatch.setattr("flwr_ppsgd.noise.clip_scale", lambda *_: 1.0)


@pytest.mark.parametrize("broken", [less_noise, no_bound])
def test_a_broken_secure_sum_is_convicted(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert audited(FEW, size=2000).verdict == "convicted"
