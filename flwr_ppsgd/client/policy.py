"""What the owner of a node allows: limits in the node config, which no server can change."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from flwr_ppsgd.checks import nearest, require
from flwr_ppsgd.client.refusal import (
    NODE_CONFIG,
    REFUSED_POLICY,
    REFUSED_SIGNATURE,
    RefusedError,
    refusing,
)
from flwr_ppsgd.signature import public_key, verify
from flwr_ppsgd.wire import Order

STATE_DIR = "ppsgd-state-dir"  # where θ is mirrored
USER = "ppsgd-user"  # whose θ it is; else the partition id
MAX_CLIP_NORM = "ppsgd-max-clip-norm"
MAX_STEP = "ppsgd-max-step"
MAX_EPSILON = "ppsgd-max-epsilon"
EVALUATE = "ppsgd-evaluate"
STOCK = "ppsgd-stock"
SERVER_KEY = "ppsgd-server-key"
PREFIX = "ppsgd-"
KEYS = (
    STATE_DIR,
    USER,
    MAX_CLIP_NORM,
    MAX_STEP,
    MAX_EPSILON,
    EVALUATE,
    STOCK,
    SERVER_KEY,
)
Arrays = Callable[[], Mapping[str, bytes]]


@dataclass(frozen=True)
class Policy:
    """The limits of one node. Whatever breaks one is refused, logged and in ``client-report``.

    Args:
        max_clip_norm: the largest C.
        max_step: the largest s_θ.
        max_epsilon: the largest ε that may be promised for the planned rounds.
        evaluate: whether evaluation on this user's data is answered.
        stock: whether stock strategies are answered; None: if the app was built with local_step.
        server_key: the public key that must have signed every Order; empty: any server is obeyed.
    """

    max_clip_norm: float = math.inf
    max_step: float = math.inf
    max_epsilon: float = math.inf
    evaluate: bool = True
    stock: bool | None = None
    server_key: str = ""

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Self:
        """What a node config says; a wrong key or value is refused."""
        if not any(key.startswith(PREFIX) for key in node_config):
            return cls()
        return refusing(NODE_CONFIG, lambda: cls._read(node_config))

    @classmethod
    def _read(cls, node: Mapping[str, Any]) -> Self:
        check_keys(node)
        policy = cls(
            max_clip_norm=_limit(node, MAX_CLIP_NORM),
            max_step=_limit(node, MAX_STEP),
            max_epsilon=_limit(node, MAX_EPSILON),
            evaluate=_switch(node, EVALUATE) is not False,
            stock=_switch(node, STOCK),
            server_key=_key(node),
        )
        if policy.stock and policy.server_key:
            raise ValueError(
                f"node config: {STOCK} and {SERVER_KEY} exclude each other, because stock "
                f"strategies do not sign: remove one of them"
            )
        return policy

    def admit(
        self,
        order: Order | None,
        kind: str,
        *,
        serves_stock: bool,
        arrays: Arrays,
    ) -> None:
        """Refuse what the owner does not allow.

        Args:
            order: what the server asks for; None in a message of a stock strategy.
            kind: ``train``, ``evaluate``, or another type of message.
            serves_stock: whether the app was built with ``local_step``.
            arrays: the serialised arrays that came along; asked for only if a key is pinned.
        """
        if kind == "evaluate" and not self.evaluate:
            raise _refused(f"{EVALUATE} is false: evaluation on this user's data is not answered")
        if self.server_key:
            self._check_signature(order, arrays)
        if order is not None:
            self._check_limits(order)
        elif kind in ("train", "evaluate"):
            self._check_stock(serves_stock)

    def _check_signature(self, order: Order | None, arrays: Arrays) -> None:
        if order is None or not verify(order, arrays(), self.server_key):
            raise RefusedError(
                REFUSED_SIGNATURE,
                f"a message that is not signed with the key that {SERVER_KEY} pins: nothing is "
                "done; if the training has a new key, ask its operator and pin that one",
            )

    def _check_limits(self, order: Order) -> None:
        limits = (
            ("clip_norm", order.clip_norm, MAX_CLIP_NORM, self.max_clip_norm),
            ("step", order.step, MAX_STEP, self.max_step),
            ("epsilon", order.epsilon, MAX_EPSILON, self.max_epsilon),
        )
        for name, value, key, limit in limits:
            if not value <= limit:
                raise _refused(f"an Order with {name} {value:g} where {key} is {limit:g}")

    def _check_stock(self, serves_stock: bool) -> None:
        allowed = serves_stock if self.stock is None else self.stock
        if not allowed:
            raise _refused(
                "a message without an Order: this client serves PPSGD only; for a stock strategy "
                f"pass local_step to client_app or PPSGDClient, or set {STOCK} = true in the node "
                "config and local-step in the run config"
            )


def check_keys(node_config: Mapping[str, Any]) -> None:
    """ValueError if a key of ours is not one that is read."""
    for key in node_config:
        if key.startswith(PREFIX) and key not in KEYS:
            meant = nearest(key, KEYS)
            raise ValueError(f"node config: unknown key {key!r}: did you mean {meant!r}?")


def _refused(reason: str) -> RefusedError:
    return RefusedError(REFUSED_POLICY, reason)


def _limit(node: Mapping[str, Any], key: str) -> float:
    """A number of at least 0; infinite if the key is not there."""
    value = node.get(key, math.inf)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    rule = f"node config: {key} must be a number of at least 0"
    require(number and value >= 0, rule, value, "set it, or remove it for no limit")
    return float(value)


def _switch(node: Mapping[str, Any], key: str) -> bool | None:
    """True, False, or None if the key is not there."""
    value = node.get(key)
    rule = f"node config: {key} must be true or false"
    require(value is None or isinstance(value, bool), rule, value, "write it without quotes")
    return value


def _key(node: Mapping[str, Any]) -> str:
    """The pinned public key; empty if there is none."""
    value = node.get(SERVER_KEY)
    if value is None:
        return ""
    text = str(value)
    try:
        public_key(text)
    except ValueError as error:
        raise ValueError(
            f"node config: {SERVER_KEY} must be a public key ed25519:BASE64, got {text[:16]!r}… "
            f"({error}): ask the training's operator for it"
        ) from None
    return text
