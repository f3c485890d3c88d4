"""The server: the run config names the strategy."""

from collections.abc import Callable

import torch
from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedProx,
    Strategy,
)

from flwr_ppsgd import PPSGD, Poisson, Release, Steps, calibrate_noise, shared_arrays, whole_module
from quickstart.task import Net

STEP = 0.5  # of θ in the paper's method, and of w times alpha-q

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train; every strategy logs what the clients measure."""
    config = context.run_config
    strategy = strategy_of(config)
    torch.manual_seed(0)
    initial_arrays = shared_arrays(Net(), "head.*", additive=True)
    rounds = int(config["num-server-rounds"])
    result = strategy.start(grid, initial_arrays, num_rounds=rounds)
    if config["final-model"]:
        network = whole_module(Net(), result.arrays, "head.*")
        torch.save(network.state_dict(), str(config["final-model"]))


def strategy_of(config: UserConfig) -> Strategy:
    """The strategy that the run config names."""
    name = str(config["strategy"])
    made: dict[str, Callable[[UserConfig], Strategy]] = {
        "ppsgd": ppsgd,
        "ppsgd-alpha": ppsgd_alpha,
        "fedavg": lambda _: FedAvg(),
        "fedprox": lambda _: FedProx(proximal_mu=float(config["proximal-mu"])),
        "fedavg-dp": fedavg_dp,
    }
    if name not in made:
        raise ValueError(f"strategy must be one of {sorted(made)}, got {name!r}")
    return made[name](config)


def ppsgd(config: UserConfig) -> PPSGD:
    """Nothing to tune."""
    return PPSGD.auto(
        population=int(config["population"]),
        epsilon=float(config["epsilon"]),
        delta=float(config["delta"]),
        evaluate_every=1,
    )


def ppsgd_alpha(config: UserConfig) -> PPSGD:
    """The paper's method: both parts take gradient steps, α says how far w moves."""
    release = Release(everyone(config), float(config["clip-norm"]), noise_multiplier(config))
    steps = Steps.from_ratio(STEP, float(config["alpha-q"]))
    delta = float(config["delta"])
    return PPSGD(release=release, steps=steps, delta=delta, evaluate_every=1)


def fedavg_dp(config: UserConfig) -> Strategy:
    """FedAvg in Flower's wrapper, which has no personal part.

    Its noise is a multiple of C/N: users must have the same number of rows, as they have here.
    """
    return DifferentialPrivacyServerSideFixedClipping(
        FedAvg(),
        noise_multiplier=noise_multiplier(config),
        clipping_norm=float(config["clip-norm"]),
        num_sampled_clients=int(config["population"]),
    )


def everyone(config: UserConfig) -> Poisson:
    """All users take part in each round."""
    return Poisson(int(config["population"]), rate=1.0)


def noise_multiplier(config: UserConfig) -> float:
    """z, with which all rounds together spend ε."""
    return calibrate_noise(
        epsilon=float(config["epsilon"]),
        delta=float(config["delta"]),
        cohort=everyone(config),
        rounds=int(config["num-server-rounds"]),
    )
