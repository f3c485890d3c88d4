"""A user's model outside training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flwr_ppsgd import PPSGD, client_app
from flwr_ppsgd.client.personal_model import PersonalModel, personalize
from flwr_ppsgd.learner import Minibatches
from flwr_ppsgd.models.torch_model import SplitModel
from tests.client.test_theta_store import Nodes
from tests.support.toy import SIZE, Toy, flat, release, strategy, target, w0


def test_a_user_s_model_is_w_plus_theta(tmp_path: Path) -> None:
    on = Nodes(tmp_path)
    result = strategy().start(on, w0(np.zeros((2, 3))), num_rounds=3)
    kept = PersonalModel.load(tmp_path, "1")
    newer = PersonalModel.load(tmp_path, "1", w=result.arrays)
    assert kept.arrays()["0"].shape == (2, 3)
    np.testing.assert_array_equal(newer.w, flat(result.arrays))
    np.testing.assert_array_equal(newer.arrays()["0"].reshape(-1), newer.w + newer.theta)
    assert not np.array_equal(kept.w, newer.w), (
        "what came with the last round is older than what was published"
    )


X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
ROWS = Minibatches(X, (X[:, 0] > 0).astype(int), 5, seed=0, user=0)


def net(personal: str = "1.*", additive: bool = False) -> SplitModel:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return SplitModel(layers, personal=personal, additive=additive)


def test_a_split_model_comes_back_as_a_torch_module(tmp_path: Path) -> None:
    on = Nodes(tmp_path, client_app(lambda _: net().learner(ROWS)), nodes=1)
    result = strategy(release=release(1)).start(on, net().initial_arrays(), num_rounds=2)
    model = PersonalModel.load(tmp_path, "0", w=result.arrays)
    module = model.module(net())
    assert not module.training
    values = dict(module.named_parameters())
    assert values["1.bias"].tolist() == pytest.approx(model.theta[-2:].tolist(), rel=1e-6)
    assert values["0.bias"].tolist() == result.arrays.to_numpy_ndarrays()[1].tolist()
    with pytest.raises(ValueError, match="cannot be added: use module"):
        model.arrays()


def test_a_newcomer_gets_a_theta_from_the_published_w_alone() -> None:
    """½‖w + θ − y‖² for θ alone: θ goes to y − w."""
    w = np.arange(SIZE) / 10
    model = personalize(w, Toy(target(9)), step=0.5, visits=60)
    np.testing.assert_allclose(model.arrays()["0"], target(9), atol=1e-12)
    np.testing.assert_array_equal(model.w, w)
    np.testing.assert_allclose(
        personalize({"w": w}, Toy(target(9)), step=1.0, visits=1).theta, target(9) - w
    )


def test_whoever_is_not_there_is_named(tmp_path: Path) -> None:
    strategy().start(Nodes(tmp_path), w0(), num_rounds=1)
    with pytest.raises(ValueError, match="no θ of user 'eve', only of"):
        PersonalModel.load(tmp_path, "eve")
    strategy().start(Nodes(tmp_path, run="b"), w0(), num_rounds=1)
    with pytest.raises(ValueError, match=r"took part in \['a run', 'b'\]: name one with run="):
        PersonalModel.load(tmp_path, "1")
    assert PersonalModel.load(tmp_path, "1", run="b").theta.size == SIZE


@pytest.mark.parametrize("personal", ["1.*", "0.*"])
def test_a_network_of_auto_comes_back_with_the_last_w(tmp_path: Path, personal: str) -> None:
    """A linear layer at the end as a mixture on features, any other block as θ."""
    on = Nodes(tmp_path, client_app(lambda _: net(personal, True).learner(ROWS)), nodes=2)
    auto = PPSGD.auto(population=2, epsilon=100.0, delta=1e-2, body=True)
    result = auto.start(on, net(personal, True).initial_arrays())
    mine = PersonalModel.load(tmp_path, "0")
    np.testing.assert_array_equal(mine.w, flat(result.arrays))
    if personal == "1.*":
        assert mine.predict(net(personal, True).features(mine.shared, X)).shape == (20, 2)
    else:
        assert mine.theta.any()
        assert mine.module(net(personal, True))(torch.from_numpy(X)).shape == (20, 2)
