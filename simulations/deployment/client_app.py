"""The clients of the deployment: each node reads one file, which never leaves it. Both APIs.

Nothing of the server's is loaded here: Flower starts a process for every message.
"""

import numpy as np
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_ppsgd import Order, client_app
from flwr_ppsgd.legacy import PPSGDClient

Floats = NDArray[np.float64]


class LeastSquares:
    """½·mean‖y − (w + θ)ᵀx‖² over the minibatch of a visit, in numpy alone.

    Flower starts a process for every message, and loading torch would take most of its time.
    """

    def __init__(self, x: Floats, y: Floats, size: int, test: tuple[Floats, Floats]) -> None:
        self._x = x
        self._y = y
        self._size = size
        self._test = test
        self.num_examples = len(x)

    def initial_theta(self) -> Floats:
        return np.zeros(self._x.shape[1] * self._y.shape[1])

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        first = (order.visit - 1) * self._size
        rows = np.arange(first, first + self._size) % len(self._x)
        x = self._x[rows]
        residual = self._predict(x, w + theta) - self._y[rows]
        gradient = (x.T @ residual).reshape(-1) / len(rows)
        return gradient, gradient

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        x, y = self._test
        residual = self._predict(x, w + theta) - y
        return {"mse": float(np.mean(residual**2))}

    def _predict(self, x: Floats, parameters: Floats) -> Floats:
        return x @ parameters.reshape(-1, self._y.shape[1])


def learner_from(path: str, size: int) -> LeastSquares:
    """The learner of one node's file."""
    with np.load(path) as data:
        test = (data["x_test"], data["y_test"])
        return LeastSquares(data["x"], data["y"], size, test)


def learner_for(context: Context) -> LeastSquares:
    """The learner of a node, whose config names its file."""
    size = int(context.run_config["batch-size"])
    return learner_from(str(context.node_config["data"]), size)


def client_fn(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context).to_client()


app = client_app(learner_for)
legacy_app = ClientApp(client_fn=client_fn)
