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
SECURE = "ppsgd-secure"
MIN_NOISE = "ppsgd-min-noise-multiplier"
MIN_CLIENTS = "ppsgd-min-clients"
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
    SECURE,
    MIN_NOISE,
    MIN_CLIENTS,
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
        secure: whether only secure sums are answered: no plain Order, no evaluation, no stock
            strategy.
        min_noise: the least z of a secure sum.
        min_clients: the least h + t of a secure sum.
    """

    max_clip_norm: float = math.inf
    max_step: float = math.inf
    max_epsilon: float = math.inf
    evaluate: bool = True
    stock: bool | None = None
    server_key: str = ""
    secure: bool = False
    min_noise: float = 0.0
    min_clients: float = 0.0

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> "Policy":
        """What a node config says; a wrong key or value is refused."""
        for key in node_config:
            if key.startswith(PREFIX):
                return refusing(NODE_CONFIG, cls._read, node_config)
        return NO_LIMITS

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
            secure=_switch(node, SECURE) is True,
            min_noise=_limit(node, MIN_NOISE, none=0.0),
            min_clients=_limit(node, MIN_CLIENTS, none=0.0),
        )
        if not policy.secure and (policy.min_noise or policy.min_clients):
            raise ValueError(
                f"node config: {MIN_NOISE} and {MIN_CLIENTS} are limits of secure sums, and the "
                f"server may ask for others: set {SECURE} = true too"
            )
        if policy.stock and policy.secure:
            raise ValueError(
                f"node config: {STOCK} and {SECURE} exclude each other, because stock strategies "
                "have no secure sum: remove one of them"
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
        delivered = order is not None and order.asks == "nothing"
        if kind == "evaluate" and not self.evaluate and not delivered:
            raise _refused(f"{EVALUATE} is false: evaluation on this user's data is not answered")
        if self.server_key:
            self._check_signature(order, arrays)
        if self.secure and not delivered:
            self._check_secure(order, kind)
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

    def _check_secure(self, order: Order | None, kind: str) -> None:
        """Refuse everything from which the server could learn about this client alone."""
        if kind == "evaluate":
            raise _refused(f"{SECURE} is true: evaluation on this user's data is not answered")
        plain = order is None or order.terms is None
        if not plain and kind == "train":
            plain = order is not None and order.stage == 0
        if plain and (order is None or order.publishes):
            raise _refused(
                f"{SECURE} is true: only secure sums are answered, and this asks for none"
            )
        if order is None or order.terms is None:
            return
        limits = (
            ("noise multiplier", order.terms.noise_multiplier, MIN_NOISE, self.min_noise),
            ("honest + colluding", order.terms.rules.least, MIN_CLIENTS, self.min_clients),
        )
        for name, value, key, least in limits:
            if not value >= least:
                raise _refused(f"a secure sum with {name} {value:g} where {key} is {least:g}")

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


NO_LIMITS = Policy()


def check_keys(node_config: Mapping[str, Any]) -> None:
    """ValueError if a key of ours is not one that is read."""
    for key in node_config:
        if key.startswith(PREFIX) and key not in KEYS:
            meant = nearest(key, KEYS)
            raise ValueError(f"node config: unknown key {key!r}: did you mean {meant!r}?")


def _refused(reason: str) -> RefusedError:
    return RefusedError(REFUSED_POLICY, reason)


def _limit(node: Mapping[str, Any], key: str, none: float = math.inf) -> float:
    """A number of at least 0; ``none`` if the key is not there."""
    value = node.get(key, none)
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
