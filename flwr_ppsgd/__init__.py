"""Personalized-Private-SGD as a plugin for Flower."""

from flwr_ppsgd.algorithm import FixedSize, Poisson, Release, Steps, client_step, clip, server_step
from flwr_ppsgd.client.message_api import Learner, client_app
from flwr_ppsgd.privacy import Ledger, affordable_rounds, calibrate_noise
from flwr_ppsgd.server.message_api import PPSGD
from flwr_ppsgd.wire import Order

__all__ = [
    "PPSGD",
    "FixedSize",
    "Learner",
    "Ledger",
    "Order",
    "Poisson",
    "Release",
    "Steps",
    "affordable_rounds",
    "calibrate_noise",
    "client_app",
    "client_step",
    "clip",
    "server_step",
]
