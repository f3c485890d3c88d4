"""fedjax: one gradient per user by ``for_each_client`` with the jit backend, and their mean.

It has no differential privacy, so gradients are neither clipped nor noised. Its own
``federated_averaging`` does the same with a few more calls per user, and takes longer.
"""

from importlib.metadata import version
from typing import TypeAlias

import fedjax
import jax
import jax.numpy as jnp

from simulations.benchmarks.neighbours.serving import (
    BATCH,
    CLASSES,
    COHORT,
    FEATURES,
    STEP,
    serve,
    user_rows,
)

Rows: TypeAlias = dict[str, jax.Array]
State: TypeAlias = tuple[jax.Array, jax.Array]  # w and the sum of gradients


def main() -> None:
    fedjax.set_for_each_client_backend("jit")
    training = Training()
    serve(training.run, f"fedjax {version('fedjax')}, jax {version('jax')}")


class Training:
    """w, and rounds that move it."""

    def __init__(self) -> None:
        x, classes = user_rows()
        users = {user: {"x": x[user], "y": classes[user]} for user in range(len(x))}
        data = fedjax.InMemoryFederatedData(users)
        self._sampler = fedjax.client_samplers.UniformGetClientSampler(data, COHORT, seed=1)
        self._minibatch = fedjax.ShuffleRepeatBatchHParams(BATCH, num_steps=1)
        self._gradients = fedjax.for_each_client(client_init, client_step, client_final)
        self._add = jax.jit(add)
        self._descend = jax.jit(descend)
        self._w = jnp.zeros((FEATURES, CLASSES))

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round()
        self._w.block_until_ready()

    def _round(self) -> None:
        clients = []
        for user, rows, coins in self._sampler.sample():
            clients.append((user, rows.shuffle_repeat_batch(self._minibatch), coins))
        total = jnp.zeros_like(self._w)
        for _, gradient in self._gradients(self._w, clients):
            total = self._add(total, gradient)
        self._w = self._descend(self._w, total)


def client_init(w: jax.Array, coins: jax.Array) -> State:  # noqa: ARG001
    return w, jnp.zeros_like(w)


def client_step(state: State, rows: Rows) -> State:
    w, total = state
    return w, total + jax.grad(loss)(w, rows)


def client_final(w: jax.Array, state: State) -> jax.Array:  # noqa: ARG001
    return state[1]


def loss(w: jax.Array, rows: Rows) -> jax.Array:
    """The mean cross-entropy of a minibatch."""
    scores = jax.nn.log_softmax(rows["x"] @ w)
    own = jnp.take_along_axis(scores, rows["y"][:, None], axis=1)
    return -own.mean()


def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
    return total + gradient


def descend(w: jax.Array, total: jax.Array) -> jax.Array:
    return w - STEP / COHORT * total


if __name__ == "__main__":
    main()
