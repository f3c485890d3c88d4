"""Real Hugging Face, PEFT, Lightning and scikit-learn, small and random: nothing is downloaded.

They are installed by ``make test-adopters`` alone; elsewhere these tests skip.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flwr_ppsgd import PPSGD, Poisson, Release, Steps, whole_module
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.kept import kept_by
from tests.support.recipes import python_block

NODES = 3
WHY = "installed by make test-adopters"


@pytest.fixture(autouse=True)
def other_peoples_warnings() -> Any:
    """Their deprecations are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def texts(rows: int = 8) -> list[dict[str, Any]]:
    """Rows as a tokenizer leaves them: lists of different lengths."""
    source = np.random.default_rng(0)
    found = []
    for row in range(rows):
        length = 3 + row % 4
        ids = source.integers(1, 50, size=length).tolist()
        found.append({"input_ids": ids, "attention_mask": [1] * length, "labels": row % 2})
    return found


def padded(rows: list[dict[str, Any]]) -> Any:
    """What ``DataCollatorWithPadding`` returns: a BatchEncoding."""
    from transformers import BatchEncoding

    longest = max(len(row["input_ids"]) for row in rows)
    parts = {"labels": torch.tensor([row["labels"] for row in rows])}
    for name in ("input_ids", "attention_mask"):
        filled = [row[name] + [0] * (longest - len(row[name])) for row in rows]
        parts[name] = torch.tensor(filled)
    return BatchEncoding(parts)


def token_loaders(context: Context) -> Any:  # noqa: ARG001
    rows: Any = texts()
    return DataLoader(rows, 4, collate_fn=padded), DataLoader(rows, 4, collate_fn=padded)


def picture_loaders(context: Context) -> Any:  # noqa: ARG001
    pictures = torch.linspace(0, 1, 8 * 64).reshape(8, 1, 8, 8)
    rows = TensorDataset(pictures, torch.zeros(8))
    return DataLoader(rows, 4), DataLoader(rows, 4)


def trained(page: dict[str, Any], **changes: Any) -> tuple[InProcessGrid, ArrayRecord, Any]:
    """A round of PPSGD with evaluation; everyone must be usable."""
    release = Release(Poisson(NODES, 1.0), clip_norm=1.0, noise_multiplier=0.0)
    settings = {"steps": Steps.from_ratio(0.5, 1.0), "delta": 1e-3, "evaluate_every": 1, **changes}
    strategy = PPSGD(release=release, **settings)
    grid = InProcessGrid(page["app"], NODES)
    result = strategy.start(grid, page["initial_arrays"], num_rounds=2)
    return grid, result.arrays, result.evaluate_metrics_clientapp


def moved(before: ArrayRecord, after: ArrayRecord) -> bool:
    pairs = zip(before.to_numpy_ndarrays(), after.to_numpy_ndarrays(), strict=True)
    return all(np.any(old != new) for old, new in pairs)


def test_hugging_face() -> None:
    pytest.importorskip("transformers", reason=WHY)
    page: dict[str, Any] = {"loaders": token_loaders}
    exec(compile(python_block("Hugging Face"), "flower-apps.md", "exec"), page)
    assert list(page["initial_arrays"]) == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    grid, arrays, metrics = trained(page)
    assert moved(page["initial_arrays"], arrays)
    assert set(metrics[2]) == {"loss", "accuracy"}
    personal = kept_by(grid.context(grid.get_node_ids()[0]))
    assert personal is not None
    whole = whole_module(page["network"](), arrays, "classifier.*", personal.theta)
    page["network"]().load_state_dict(whole.state_dict(), strict=True)


def test_peft_shares_its_adapters_alone() -> None:
    pytest.importorskip("peft", reason=WHY)
    page: dict[str, Any] = {"loaders": token_loaders}
    exec(compile(python_block("Hugging Face"), "flower-apps.md", "exec"), page)
    exec(compile(python_block("PEFT and LoRA"), "flower-apps.md", "exec"), page)
    shared = list(page["initial_arrays"])
    assert len(shared) == 4
    assert all("lora_" in name for name in shared)
    _, arrays, _ = trained(page)
    for name in shared:
        if "lora_B" in name:  # A has no gradient while B is zero
            assert np.any(arrays[name].numpy() != page["initial_arrays"][name].numpy())


def test_lightning() -> None:
    pytest.importorskip("lightning", reason=WHY)
    page: dict[str, Any] = {"loaders": picture_loaders}
    exec(compile(python_block("Lightning"), "flower-apps.md", "exec"), page)
    _, arrays, metrics = trained(page)
    assert all(name.startswith("encoder.") for name in arrays)
    assert moved(page["initial_arrays"], arrays)
    assert np.isfinite(metrics[2]["loss"])


def logistic(arrays: list[Any]) -> Any:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=1, warm_start=True)
    model.classes_ = np.array([0, 1])
    model.coef_, model.intercept_ = (array.copy() for array in arrays)
    return model


class SklearnClient(NumPyClient):
    """A client as scikit-learn's users have it."""

    def fit(self, parameters: Any, config: Any) -> Any:  # noqa: ARG002
        model = logistic(parameters)
        x = np.random.default_rng(0).normal(size=(30, 4))
        model.fit(x, (x[:, 0] > 0).astype(int))
        return [model.coef_, model.intercept_], len(x), {}


def sklearn_client(context: Context) -> Client:  # noqa: ARG001
    return SklearnClient().to_client()


sklearn_app = ClientApp()


@sklearn_app.train()
def sklearn_train(message: Message, context: Context) -> Message:  # noqa: ARG001
    arrays = message.content.array_records["arrays"].to_numpy_ndarrays()
    trained_arrays, _, _ = SklearnClient().fit(arrays, {})
    return Message(RecordDict({"arrays": ArrayRecord(trained_arrays)}), reply_to=message)


@pytest.mark.parametrize("app", [ClientApp(client_fn=sklearn_client), sklearn_app])
def test_scikit_learn_clients_stay_as_they_are(app: ClientApp) -> None:
    pytest.importorskip("sklearn", reason=WHY)
    initial = ArrayRecord([np.zeros((1, 4)), np.zeros(1)])
    page = {"app": app, "initial_arrays": initial}
    steps = Steps(shared=1.0, personal=0.0)
    _, arrays, _ = trained(page, replies="parameters", steps=steps, evaluate_every=0)
    coefficients: Tensor = torch.tensor(arrays.to_numpy_ndarrays()[0][0])
    assert int(coefficients.abs().argmax()) == 0
    assert coefficients[0] > 0
