"""Any torch optimizer on the server: against torch itself, and to the same bits after a restart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr_ppsgd.optimizers import Released

from flwr_ppsgd import Schedule, Steps, TorchServer, client_app
from flwr_ppsgd.simulation import InProcessGrid
from tests.server.test_recipe_rounds import USERS, noisy, solver
from tests.support.toy import SIZE, Floats, flat, strategy, w0

W = np.array([1.0, -2.0, 0.5, 0.0])
MEANS = np.random.default_rng(3).standard_normal((7, len(W)))
STEP = 0.05
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"alpha": 0.9, "centered": True, "momentum": 0.5}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.Rprop, {}),
]
IDS = [f"{made.__name__}{list(options)}" for made, options in OPTIMIZERS]


def released(mean: Floats) -> Released:
    release = noisy()
    return Released(mean * release.denominator, release, 0.1, release.clip_norm)


def by_torch(made: Any, options: dict[str, Any], factor: Any = lambda _: 1.0) -> Floats:
    parameter = torch.nn.Parameter(torch.tensor(W))
    optimizer = made([parameter], lr=STEP, **options)
    for done, mean in enumerate(MEANS):
        for group in optimizer.param_groups:
            group["lr"] = STEP * factor(done)
        parameter.grad = torch.tensor(released(mean).mean)
        optimizer.step()
    found: Floats = parameter.detach().numpy()
    return found


def by_server(server: TorchServer) -> Floats:
    w = W
    state = server.initial(len(W))
    shapes = {name: vector.shape for name, vector in state.items()}
    for mean in MEANS:
        # only names and float64 vectors survive a checkpoint
        kept = {name: np.array(vector, dtype=np.float64) for name, vector in state.items()}
        w, state = server.moved(w, released(mean), STEP, kept)
        assert {name: vector.shape for name, vector in state.items()} == shapes
        assert all(vector.dtype == np.float64 for vector in state.values())
    return w


@pytest.mark.parametrize(("made", "options"), OPTIMIZERS, ids=IDS)
def test_w_moves_as_torch_moves_a_parameter(made: Any, options: dict[str, Any]) -> None:
    """To the last bit, though the optimizer is made anew from its state in every round."""
    np.testing.assert_array_equal(by_server(TorchServer(made, options)), by_torch(made, options))


def test_the_schedule_is_a_factor_on_the_learning_rate() -> None:
    schedule = Schedule("linear", rounds=10)
    found = by_server(TorchServer(torch.optim.RMSprop, schedule=schedule))
    expected = by_torch(torch.optim.RMSprop, {}, schedule.factor)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {}])
def test_neither_w_nor_the_state_is_changed_in_place(options: dict[str, Any]) -> None:
    server = TorchServer(torch.optim.RMSprop, options)
    _, state = server.moved(W, released(MEANS[0]), STEP, server.initial(len(W)))
    before = {name: vector.copy() for name, vector in state.items()}
    w = W.copy()
    server.moved(w, released(MEANS[1]), STEP, state)
    np.testing.assert_array_equal(w, W)
    for name, vector in state.items():
        np.testing.assert_array_equal(vector, before[name])


@pytest.mark.parametrize("made", [torch.optim.RMSprop, torch.optim.NAdam])
def test_a_restart_goes_on_to_the_same_bits(tmp_path: Path, made: Any) -> None:
    def run(directory: Path, stops: list[int]) -> Floats:
        for rounds in stops:
            ppsgd = strategy(
                release=noisy(),
                steps=Steps(shared=0.1, personal=0.0),
                optimizer=TorchServer(made),
                checkpoint_dir=directory,
                insecure_seed=3,
            )
            grid = InProcessGrid(client_app(solver), USERS)
            arrays = ppsgd.start(grid, w0(), num_rounds=rounds).arrays
        return flat(arrays)

    whole = run(tmp_path / "whole", [5])
    assert whole.shape == (SIZE,)
    np.testing.assert_array_equal(run(tmp_path / "parts", [1, 3, 5]), whole)


def test_a_checkpoint_of_another_class_is_refused(tmp_path: Path) -> None:
    """Adam and AdamW keep tensors of the same names."""
    settings: dict[str, Any] = {"release": noisy(), "checkpoint_dir": tmp_path}
    grid = InProcessGrid(client_app(solver), USERS)
    strategy(**settings, optimizer=TorchServer(torch.optim.Adam)).start(grid, w0(), num_rounds=1)
    again = strategy(**settings, optimizer=TorchServer(torch.optim.AdamW))
    with pytest.raises(ValueError, match="same optimizer"):
        again.start(grid, w0(), num_rounds=2)
    assert again.ledger.rounds == 1


class Learned(torch.optim.SGD):
    """Keeps a number among its settings."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["learnt"] = self.param_groups[0].get("learnt", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("made", "options", "words"),
    [
        ("adam", {}, "optimizer must be a class of torch.optim, got 'adam'"),
        (torch.optim.Adam, {"lr": 0.1}, r"options must not hold lr, .* it is steps.shared"),
        (torch.optim.Adam, {"speed": 1}, "Adam refuses its options: .*'speed'"),
        (torch.optim.Adam, {"eps": -1.0}, "Invalid epsilon"),
        (torch.optim.LBFGS, {}, "LBFGS cannot move w.*closure.*use another class"),
        (torch.optim.SparseAdam, {}, "SparseAdam cannot move w.*dense"),
        (torch.optim.Muon, {}, "2D"),
        (Learned, {}, "Learned keeps what it has learnt among its settings"),
    ],
)
def test_what_a_server_cannot_use_is_refused(made: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        TorchServer(made, options)
    assert "\n" not in str(refusal.value)
