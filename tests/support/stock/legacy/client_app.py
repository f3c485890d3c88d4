from typing import Any

import torch
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context

from tests.support.stock.task import Loader, Net, get_weights, load_data, set_weights, test, train


class FlowerClient(NumPyClient):
    def __init__(
        self, trainloader: Loader, valloader: Loader, local_epochs: int, learning_rate: float
    ) -> None:
        self.net = Net()
        self.trainloader = trainloader
        self.valloader = valloader
        self.local_epochs = local_epochs
        self.lr = learning_rate
        self.device = torch.device("cpu")

    def fit(self, parameters: Any, config: Any) -> Any:  # noqa: ARG002
        set_weights(self.net, parameters)
        train(self.net, self.trainloader, self.local_epochs, self.lr, self.device)
        return get_weights(self.net), len(self.trainloader.dataset), {}  # type: ignore[arg-type]

    def evaluate(self, parameters: Any, config: Any) -> Any:  # noqa: ARG002
        set_weights(self.net, parameters)
        loss, accuracy = test(self.net, self.valloader, self.device)
        return loss, len(self.valloader.dataset), {"accuracy": accuracy}  # type: ignore[arg-type]


def client_fn(context: Context) -> Client:
    partition_id = int(context.node_config["partition-id"])
    num_partitions = int(context.node_config["num-partitions"])
    batch_size = int(context.run_config["batch-size"])
    trainloader, valloader = load_data(partition_id, num_partitions, batch_size)
    local_epochs = int(context.run_config["local-epochs"])
    learning_rate = float(context.run_config["learning-rate"])

    # Return Client instance
    return FlowerClient(trainloader, valloader, local_epochs, learning_rate).to_client()


app = ClientApp(client_fn)
