"""pfl: federated averaging of a linear model with central Gaussian noise, then fine-tuning by each
user on own rows. Prints the best of a grid, chosen on the test rows, as JSON."""

import asyncio
import contextlib
import copy
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.bridge import FrameworkBridgeFactory
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor, nn

from simulations.benchmarks.neighbours.serving import CLIP_NORM, Rows, read_rows

STEPS = (1.0, 5.0)
TUNING = ((1.0, 10), (5.0, 10))  # step and epochs of fine-tuning
BATCH = 20


class Linear(nn.Linear):
    """A linear model as pfl asks for it."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:  # noqa: ARG002
        return {}


def main(path: Path, noise: dict[str, float]) -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())  # pfl asks for the current one
    torch.set_num_threads(1)
    rows = read_rows(path)
    found = []
    with contextlib.redirect_stdout(io.StringIO()):  # pfl prints every round
        for rounds, noise_multiplier in noise.items():
            for step in STEPS:
                start = time.process_time()
                model = trained(rows, int(rounds), noise_multiplier, step)
                seconds = time.process_time() - start
                for own_step, epochs in TUNING:
                    accuracy, tuning = fine_tuned(rows, model, own_step, epochs)
                    chosen = f"{rounds} rounds, step {step:g}, then {epochs} epochs"
                    found.append((accuracy, seconds + tuning, chosen))
    accuracy, seconds, chosen = max(found)
    print(json.dumps({"accuracy": accuracy, "seconds": seconds, "chosen": chosen}))


def user_dataset(rows: Rows, user: int) -> Dataset:
    x, y, _, _ = rows.of_user(user)
    return Dataset((torch.tensor(x, dtype=torch.float32), torch.tensor(y)))


def trained(rows: Rows, rounds: int, noise_multiplier: float, step: float) -> PyTorchModel:
    """All users take part in every round, with one local epoch each."""
    linear = Linear(rows.features, rows.classes, bias=False)
    nn.init.zeros_(linear.weight)
    server = torch.optim.SGD(linear.parameters(), lr=1.0)
    model = PyTorchModel(linear, torch.optim.SGD, server)
    sampler = get_user_sampler("minimize_reuse", list(range(rows.users)))
    users = FederatedDataset(lambda user: user_dataset(rows, user), sampler)
    mechanism = GaussianMechanism(CLIP_NORM, noise_multiplier)
    backend = SimulatedBackend(users, users, [CentrallyAppliedPrivacyMechanism(mechanism)])
    plan = NNAlgorithmParams(
        rounds, sys.maxsize, train_cohort_size=rows.users, val_cohort_size=None
    )
    local = local_training(step, 1)
    FederatedAveraging().run(plan, backend, model, local, send_metrics_to_platform=False)
    return model


def local_training(step: float, epochs: int) -> NNTrainHyperParams:
    return NNTrainHyperParams(
        local_batch_size=BATCH, local_num_epochs=epochs, local_learning_rate=step
    )


def fine_tuned(rows: Rows, model: PyTorchModel, step: float, epochs: int) -> tuple[float, float]:
    """Accuracy on the test rows, and the CPU seconds that fine-tuning and testing took."""
    start = time.process_time()
    published = copy.deepcopy(model.get_parameters())
    right = total = 0
    for user in range(rows.users):
        model.set_parameters(published)
        training = local_training(step, epochs)
        FrameworkBridgeFactory.sgd_bridge().do_sgd(model, user_dataset(rows, user), training)
        _, _, x_test, y_test = rows.of_user(user)
        with torch.no_grad():
            scores = model.pytorch_model(torch.tensor(x_test, dtype=torch.float32))
        right += int((scores.argmax(1).numpy() == y_test).sum())
        total += len(y_test)
    model.set_parameters(published)
    return right / total, time.process_time() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
