"""Personalized-Private-SGD as a plugin for Flower.

What most programs need is imported from here; rarer names are imported from their module. A name is
loaded when it is first used, so that a client never pays for the server's accounting, and a linear
model never pays for torch.
"""

from typing import TYPE_CHECKING

from flwr_ppsgd.lazy_names import lazy_names

if TYPE_CHECKING:
    from flwr_ppsgd.algorithm import (
        FixedSize,
        Poisson,
        PrivateMetrics,
        Release,
        SecureSum,
        Steps,
    )
    from flwr_ppsgd.client.app import client_app
    from flwr_ppsgd.client.personal_model import PersonalModel, personalize
    from flwr_ppsgd.learner import Learner, Minibatches
    from flwr_ppsgd.ledger import Ledger, affordable_rounds, calibrate_noise
    from flwr_ppsgd.models.additive_linear import AdditiveLinear
    from flwr_ppsgd.models.representation import RandomConvolution
    from flwr_ppsgd.models.torch_app import (
        shared_arrays,
        torch_client,
        torch_learner,
        whole_module,
    )
    from flwr_ppsgd.models.torch_model import AdditiveHead, SplitModel
    from flwr_ppsgd.server.strategy import PPSGD
    from flwr_ppsgd.wire import Order

__all__ = [
    "PPSGD",
    "AdditiveHead",
    "AdditiveLinear",
    "FixedSize",
    "Learner",
    "Ledger",
    "Minibatches",
    "Order",
    "PersonalModel",
    "Poisson",
    "PrivateMetrics",
    "RandomConvolution",
    "Release",
    "SecureSum",
    "SplitModel",
    "Steps",
    "affordable_rounds",
    "calibrate_noise",
    "client_app",
    "personalize",
    "shared_arrays",
    "torch_client",
    "torch_learner",
    "whole_module",
]

_HOMES = {
    "PPSGD": "flwr_ppsgd.server.strategy",
    "AdditiveHead": "flwr_ppsgd.models.torch_model",
    "AdditiveLinear": "flwr_ppsgd.models.additive_linear",
    "FixedSize": "flwr_ppsgd.algorithm",
    "Learner": "flwr_ppsgd.learner",
    "Ledger": "flwr_ppsgd.ledger",
    "Minibatches": "flwr_ppsgd.learner",
    "Order": "flwr_ppsgd.wire",
    "PersonalModel": "flwr_ppsgd.client.personal_model",
    "Poisson": "flwr_ppsgd.algorithm",
    "PrivateMetrics": "flwr_ppsgd.algorithm",
    "RandomConvolution": "flwr_ppsgd.models.representation",
    "Release": "flwr_ppsgd.algorithm",
    "SecureSum": "flwr_ppsgd.algorithm",
    "SplitModel": "flwr_ppsgd.models.torch_model",
    "Steps": "flwr_ppsgd.algorithm",
    "affordable_rounds": "flwr_ppsgd.ledger",
    "calibrate_noise": "flwr_ppsgd.ledger",
    "client_app": "flwr_ppsgd.client.app",
    "personalize": "flwr_ppsgd.client.personal_model",
    "shared_arrays": "flwr_ppsgd.models.torch_app",
    "torch_client": "flwr_ppsgd.models.torch_app",
    "torch_learner": "flwr_ppsgd.models.torch_app",
    "whole_module": "flwr_ppsgd.models.torch_app",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
