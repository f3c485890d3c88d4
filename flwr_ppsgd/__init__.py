"""Personalized-Private-SGD as a plugin for Flower.

Every public name can be imported from here. A name is loaded when it is first used, so that a
client never pays for the server's accounting, and a linear model never pays for torch.
"""

from typing import TYPE_CHECKING

from flwr_ppsgd.door import opened

if TYPE_CHECKING:
    from flwr_ppsgd.algorithm import (
        FixedSize,
        Poisson,
        PrivateMetrics,
        Release,
        SecureSum,
        Steps,
        client_step,
        clip,
        server_step,
    )
    from flwr_ppsgd.client.message_api import client_app
    from flwr_ppsgd.client.model import PersonalModel, personalize
    from flwr_ppsgd.learner import Learner, Minibatches, Solution
    from flwr_ppsgd.models.additive_head import AdditiveHead
    from flwr_ppsgd.models.linear import AdditiveLinear
    from flwr_ppsgd.models.representation import Backbone, RandomConvolution, RandomFourier
    from flwr_ppsgd.models.split import SplitModel
    from flwr_ppsgd.models.torch_app import (
        shared_arrays,
        torch_client,
        torch_learner,
        whole_module,
    )
    from flwr_ppsgd.models.torch_server import TorchServer
    from flwr_ppsgd.optimizers import SGD, Adam, Momentum, Schedule
    from flwr_ppsgd.privacy import Ledger, affordable_rounds, calibrate_noise
    from flwr_ppsgd.server.message_api import PPSGD
    from flwr_ppsgd.wire import Order

__all__ = [
    "PPSGD",
    "SGD",
    "Adam",
    "AdditiveHead",
    "AdditiveLinear",
    "Backbone",
    "FixedSize",
    "Learner",
    "Ledger",
    "Minibatches",
    "Momentum",
    "Order",
    "PersonalModel",
    "Poisson",
    "PrivateMetrics",
    "RandomConvolution",
    "RandomFourier",
    "Release",
    "Schedule",
    "SecureSum",
    "Solution",
    "SplitModel",
    "Steps",
    "TorchServer",
    "affordable_rounds",
    "calibrate_noise",
    "client_app",
    "client_step",
    "clip",
    "personalize",
    "server_step",
    "shared_arrays",
    "torch_client",
    "torch_learner",
    "whole_module",
]

_HOMES = {
    "PPSGD": "flwr_ppsgd.server.message_api",
    "SGD": "flwr_ppsgd.optimizers",
    "Adam": "flwr_ppsgd.optimizers",
    "AdditiveHead": "flwr_ppsgd.models.additive_head",
    "AdditiveLinear": "flwr_ppsgd.models.linear",
    "Backbone": "flwr_ppsgd.models.representation",
    "FixedSize": "flwr_ppsgd.algorithm",
    "Learner": "flwr_ppsgd.learner",
    "Ledger": "flwr_ppsgd.privacy",
    "Minibatches": "flwr_ppsgd.learner",
    "Momentum": "flwr_ppsgd.optimizers",
    "Order": "flwr_ppsgd.wire",
    "PersonalModel": "flwr_ppsgd.client.model",
    "Poisson": "flwr_ppsgd.algorithm",
    "PrivateMetrics": "flwr_ppsgd.algorithm",
    "RandomConvolution": "flwr_ppsgd.models.representation",
    "RandomFourier": "flwr_ppsgd.models.representation",
    "Release": "flwr_ppsgd.algorithm",
    "Schedule": "flwr_ppsgd.optimizers",
    "SecureSum": "flwr_ppsgd.algorithm",
    "Solution": "flwr_ppsgd.learner",
    "SplitModel": "flwr_ppsgd.models.split",
    "Steps": "flwr_ppsgd.algorithm",
    "TorchServer": "flwr_ppsgd.models.torch_server",
    "affordable_rounds": "flwr_ppsgd.privacy",
    "calibrate_noise": "flwr_ppsgd.privacy",
    "client_app": "flwr_ppsgd.client.message_api",
    "client_step": "flwr_ppsgd.algorithm",
    "clip": "flwr_ppsgd.algorithm",
    "personalize": "flwr_ppsgd.client.model",
    "server_step": "flwr_ppsgd.algorithm",
    "shared_arrays": "flwr_ppsgd.models.torch_app",
    "torch_client": "flwr_ppsgd.models.torch_app",
    "torch_learner": "flwr_ppsgd.models.torch_app",
    "whole_module": "flwr_ppsgd.models.torch_app",
}
__getattr__, __dir__ = opened(__name__, _HOMES)
