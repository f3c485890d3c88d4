"""pfl: federated averaging with one local step, clipped, with central Gaussian noise.

``torch`` uses its own model for torch, as its tutorials do. ``numpy`` is a model in NumPy with the
interface that its documentation asks of one's own models.
"""

import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.base import StatefulModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics

from simulations.benchmarks.neighbours.serving import (
    BATCH,
    CLASSES,
    CLIP_NORM,
    COHORT,
    FEATURES,
    NOISE_MULTIPLIER,
    STEP,
    USERS,
    serve,
    user_rows,
)


def main(kind: str) -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())  # pfl asks for the current one
    model, algorithm, as_array = KINDS[kind]()
    users = federated_dataset(as_array)
    mechanism = GaussianMechanism(CLIP_NORM, NOISE_MULTIPLIER)
    backend = SimulatedBackend(users, users, [CentrallyAppliedPrivacyMechanism(mechanism)])
    local = NNTrainHyperParams(
        local_batch_size=BATCH,
        local_num_epochs=None,
        local_num_steps=1,
        local_learning_rate=STEP,
    )
    done = 0

    def run(rounds: int) -> None:
        nonlocal done
        done += rounds
        never = sys.maxsize
        plan = NNAlgorithmParams(done, never, train_cohort_size=COHORT, val_cohort_size=None)
        algorithm.run(plan, backend, model, local, send_metrics_to_platform=False)

    serve(run, f"pfl {version('pfl')}")


def federated_dataset(as_array: Callable[[Any], Any]) -> FederatedDataset:
    """A visit sees ten of the user's rows, drawn anew."""
    x, classes = user_rows()
    source = np.random.default_rng(1)

    def minibatch(user: int) -> Dataset:
        rows = source.integers(x.shape[1], size=BATCH)
        return Dataset((as_array(x[user, rows]), as_array(classes[user, rows])))

    return FederatedDataset(minibatch, get_user_sampler("random", list(range(USERS))))


class Softmax(StatefulModel):  # type: ignore[misc]
    """w of a linear model with softmax, as one NumPy array."""

    def __init__(self) -> None:
        self.w = np.zeros((FEATURES, CLASSES), np.float32)

    def step(self, x: NDArray[np.float32], classes: NDArray[np.int64]) -> None:
        scores = x @ self.w
        scores -= scores.max(axis=1, keepdims=True)
        residual = np.exp(scores)
        residual /= residual.sum(axis=1, keepdims=True)
        residual[np.arange(len(x)), classes] -= 1
        self.w = self.w - np.float32(STEP / len(x)) * (x.T @ residual)

    def get_parameters(self, placeholders: Any = None) -> MappedVectorStatistics:  # noqa: ARG002
        return MappedVectorStatistics({"w": self.w})

    def set_parameters(self, w: MappedVectorStatistics) -> None:
        self.w = w["w"]

    def get_model_difference(
        self,
        other_parameters: MappedVectorStatistics,
        clone: bool = False,  # noqa: ARG002
    ) -> MappedVectorStatistics:
        return MappedVectorStatistics({"w": self.w - other_parameters["w"]})

    def apply_model_update(self, statistics: MappedVectorStatistics) -> tuple["Softmax", Metrics]:
        self.w = self.w + statistics["w"].astype(np.float32)
        return self, Metrics()

    def evaluate(self, *arguments: Any) -> Metrics:  # noqa: ARG002
        return Metrics()

    def save(self, dir_path: str) -> None:
        raise NotImplementedError

    def load(self, dir_path: str) -> None:
        raise NotImplementedError


class OneStep(FederatedAveraging):  # type: ignore[misc]
    """Federated averaging with the local step of ``Softmax``."""

    def train_one_user(
        self,
        initial_model_state: MappedVectorStatistics,
        model: Softmax,
        user_dataset: Dataset,
        central_context: Any,  # noqa: ARG002
    ) -> tuple[MappedVectorStatistics, Metrics]:
        model.step(*user_dataset.raw_data)
        return model.get_model_difference(initial_model_state), Metrics()


def of_numpy() -> tuple[Any, FederatedAveraging, Callable[[Any], Any]]:
    return Softmax(), OneStep(), np.asarray


def of_torch() -> tuple[Any, FederatedAveraging, Callable[[Any], Any]]:
    import torch
    from pfl.model.pytorch import PyTorchModel
    from torch import Tensor, nn

    class Linear(nn.Linear):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:  # noqa: ARG002
            return {}

    torch.set_num_threads(1)
    linear = Linear(FEATURES, CLASSES, bias=False)
    server = torch.optim.SGD(linear.parameters(), lr=1.0)
    model = PyTorchModel(linear, torch.optim.SGD, server)
    return model, FederatedAveraging(), torch.from_numpy


KINDS = {"numpy": of_numpy, "torch": of_torch}

if __name__ == "__main__":
    main(*sys.argv[1:])
