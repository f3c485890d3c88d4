from typing import Any

import torch
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from tests.support.stock.task import Net, get_weights, load_centralized_dataset, set_weights, test


def weighted_average(metrics: Any) -> Any:
    total = sum(count for count, _ in metrics)
    return {"accuracy": sum(count * each["accuracy"] for count, each in metrics) / total}


def global_evaluate(server_round: int, parameters: Any, config: Any) -> Any:  # noqa: ARG001
    model = Net()
    set_weights(model, parameters)
    loss, accuracy = test(model, load_centralized_dataset(), torch.device("cpu"))
    return loss, {"accuracy": accuracy}


def server_fn(context: Context) -> ServerAppComponents:
    num_rounds = int(context.run_config["num-server-rounds"])
    parameters = ndarrays_to_parameters(get_weights(Net()))
    strategy = FedAvg(
        fraction_fit=1.0,
        fraction_evaluate=float(context.run_config["fraction-evaluate"]),
        min_available_clients=2,
        evaluate_metrics_aggregation_fn=weighted_average,
        evaluate_fn=global_evaluate,
        initial_parameters=parameters,
    )
    config = ServerConfig(num_rounds=num_rounds)

    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
