import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tests.support.stock.task import Loader, Net, load_data
from tests.support.stock.task import test as test_fn
from tests.support.stock.task import train as train_fn

app = ClientApp()


def own_loaders(context: Context) -> tuple[Loader, Loader]:
    partition_id = int(context.node_config["partition-id"])
    num_partitions = int(context.node_config["num-partitions"])
    return load_data(partition_id, num_partitions, int(context.run_config["batch-size"]))


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict(), strict=True)
    trainloader, _ = own_loaders(context)
    train_loss = train_fn(model, trainloader, 1, 0.1, torch.device("cpu"))
    count = len(trainloader.dataset)  # type: ignore[arg-type]
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": count})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict(), strict=True)
    _, valloader = own_loaders(context)
    eval_loss, eval_acc = test_fn(model, valloader, torch.device("cpu"))
    count = len(valloader.dataset)  # type: ignore[arg-type]
    metrics = MetricRecord({"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": count})
    content = RecordDict({"metrics": metrics})
    return Message(content=content, reply_to=msg)
