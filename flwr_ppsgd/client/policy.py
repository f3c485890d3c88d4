"""What the owner of a node allows: limits in the node config, which no server can change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from flwr.app import MessageType

from flwr_ppsgd.checks import is_number, nearest, require
from flwr_ppsgd.client.refusal import RefusalCode, RefusedError, limit_refusal
from flwr_ppsgd.recipe import SCALAR_BOUND
from flwr_ppsgd.signature import public_key, verify
from flwr_ppsgd.wire import Order

PREFIX = "ppsgd-"
STATE_DIR = "ppsgd-state-dir"  # where the device's store is
USER = "ppsgd-user"  # whose it is; else the partition id
MAX_CLIP_NORM = "ppsgd-max-clip-norm"
MAX_STEP = "ppsgd-max-step"
MAX_EPSILON = "ppsgd-max-epsilon"
MAX_OWN_EPSILON = "ppsgd-max-own-epsilon"
OWN_EPSILON = "ppsgd-epsilon"
DELTA = "ppsgd-delta"
EVALUATE = "ppsgd-evaluate"
STOCK = "ppsgd-stock"
SERVER_KEY = "ppsgd-server-key"
SECURE = "ppsgd-secure"
COMPLETE = "ppsgd-complete"
MIN_NOISE = "ppsgd-min-noise-multiplier"
MIN_CLIENTS = "ppsgd-min-clients"
LARGEST_DELTA = 0.1
BOUNDS = {"unit": SCALAR_BOUND, "size": SCALAR_BOUND, "count": SCALAR_BOUND, "columns": 1.0}


@dataclass(frozen=True)
class Policy:
    """The limits of one node. Whatever breaks one is refused, logged and in ``client-report``.

    Each has the name of its key in the node config.

    Args:
        max_clip_norm: the largest C.
        max_step: the largest s_θ.
        max_epsilon: the largest ε that servers may promise, summed over their trainings.
        max_own_epsilon: the largest ε by the device's own account; infinite: no limit.
        epsilon: the ε that this user wants in each training; infinite: what is promised to all.
        delta: δ of the two above; 0 if neither is set.
        evaluate: whether evaluation on this user's data is answered.
        stock: whether stock strategies are answered; None: if the app was built with local_step.
        server_key: the public key that must have signed every Order; empty: any server is obeyed.
        secure: whether only secure sums are answered: no plain Order, no evaluation, no stock
            strategy.
        complete: whether all clients of a secure sum must be neighbours of each other.
        min_noise_multiplier: the least z of a secure sum.
        min_clients: the least h + t of a secure sum.
    """

    max_clip_norm: float = math.inf
    max_step: float = math.inf
    max_epsilon: float = math.inf
    max_own_epsilon: float = math.inf
    epsilon: float = math.inf
    delta: float = 0.0
    evaluate: bool = True
    stock: bool | None = None
    server_key: str = ""
    secure: bool = False
    complete: bool = False
    min_noise_multiplier: float = 0.0
    min_clients: float = 0.0

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Self:
        """What a node config says; RefusedError if a key or a value is wrong."""
        limits = {}
        try:
            for key, value in node_config.items():
                if key in LIMITS:
                    limits[LIMITS[key]] = _checked_value(key, value)
                elif key.startswith(PREFIX) and key not in KEYS:
                    raise ValueError(f"unknown key {key!r}: did you mean {nearest(key, KEYS)!r}?")
            policy = cls(**limits)
            policy._check_together(node_config)
        except ValueError as error:
            raise RefusedError(RefusalCode.NODE_CONFIG, f"node config: {error}") from None
        return policy

    def _check_together(self, node: Mapping[str, Any]) -> None:
        """ValueError if two settings do not go together."""
        if not self.secure and (self.min_noise_multiplier or self.min_clients or self.complete):
            raise ValueError(
                f"{MIN_NOISE}, {MIN_CLIENTS} and {COMPLETE} are limits of secure sums, and the "
                f"server may ask for others: set {SECURE} = true too"
            )
        if self.needs_plan:
            rule = f"{DELTA} must be above 0 and below {LARGEST_DELTA:g}"
            remedy = f"{MAX_OWN_EPSILON} and {OWN_EPSILON} are stated at it, well below 1/users"
            require(0 < self.delta < LARGEST_DELTA, rule, self.delta, remedy)
        if self.limits_own and not node.get(STATE_DIR):
            raise ValueError(f"{MAX_OWN_EPSILON} needs an account on disk: set {STATE_DIR} too")
        if self.stock and (self.secure or self.server_key or self.needs_plan):
            raise ValueError(
                f"{STOCK} and each of {SECURE}, {SERVER_KEY}, {MAX_OWN_EPSILON} and {OWN_EPSILON} "
                "exclude each other, because stock strategies have no secure sums, signatures or "
                f"ε: remove {STOCK}"
            )

    @property
    def limits_own(self) -> bool:
        """Whether the device's own account has a limit."""
        return self.max_own_epsilon < math.inf

    @property
    def needs_plan(self) -> bool:
        """Whether this node needs to know everything that a training will release about it."""
        return self.limits_own or self.epsilon < math.inf

    @property
    def measures(self) -> bool:
        """Whether measures on this user's data may leave."""
        return self.evaluate and not self.secure and not self.limits_own

    def admit(
        self,
        order: Order | None,
        kind: str,
        arrays: Mapping[str, bytes],
        *,
        run: int,
        serves_stock: bool,
    ) -> None:
        """RefusedError for what the owner does not allow.

        Args:
            order: what the server asks for; None in a message of a stock strategy.
            kind: ``train``, ``evaluate``, or another type of message.
            arrays: the serialised arrays that came along.
            run: the id of Flower's run.
            serves_stock: whether the app was built with ``local_step``.
        """
        if self.server_key:
            verified = order is not None and verify(
                order, arrays, self.server_key, kind=kind, run=run
            )
            if not verified:
                raise RefusedError(
                    RefusalCode.REFUSED_SIGNATURE,
                    f"a message that is not signed with the key that {SERVER_KEY} pins, for this "
                    "type of message and this run: nothing is done; if the training has a new key, "
                    "ask its operator and pin that one",
                )
        if kind == MessageType.EVALUATE and not delivers(order) and not self.measures:
            raise limit_refusal(
                f"evaluation on this user's data is not answered, because of {EVALUATE}, {SECURE} "
                f"or {MAX_OWN_EPSILON}"
            )
        if order is None:
            self._check_stock(kind, serves_stock)
            return
        self._check_limits(order)
        if self.secure and order.publishes and kind != MessageType.EVALUATE:
            # the check before round one carries no exchange, only the terms
            is_secure = order.stage > 0 if kind == MessageType.TRAIN else order.terms is not None
            if not is_secure:
                raise limit_refusal(f"a plain sum where {SECURE} is true: nothing is sent")

    def _check_limits(self, order: Order) -> None:
        """Of this Order, of the scalars that its plan will ask for, and of a secure sum's terms."""
        bounds = [BOUNDS[part] for part in order.plan if part in BOUNDS]
        largest_bound = max(order.clip_norm, *bounds, 0.0)
        for name, value, key, most in (
            ("clip_norm", largest_bound, MAX_CLIP_NORM, self.max_clip_norm),
            ("step", order.step, MAX_STEP, self.max_step),
        ):
            if not value <= most:
                raise limit_refusal(f"an Order with {name} {value:g} where {key} is {most:g}")
        terms = order.terms
        if terms is None:
            return
        for name, value, key, least in (
            ("noise multiplier", terms.noise_multiplier, MIN_NOISE, self.min_noise_multiplier),
            ("honest + colluding", terms.rules.least, MIN_CLIENTS, self.min_clients),
        ):
            if not value >= least:
                raise limit_refusal(f"a secure sum with {name} {value:g} where {key} is {least:g}")
        if self.complete and not terms.rules.is_complete(terms.population):
            raise limit_refusal(
                f"a secure sum of {terms.population} clients that are not all neighbours of each "
                f"other, where {COMPLETE} is true"
            )

    def _check_stock(self, kind: str, serves_stock: bool) -> None:
        if self.secure:
            raise limit_refusal(f"{SECURE} is true: a message without an Order is not answered")
        if kind == MessageType.QUERY:
            return
        if self.needs_plan:
            raise limit_refusal(
                f"a message without an Order has no ε, and {MAX_OWN_EPSILON} or {OWN_EPSILON} is "
                "set: nothing is sent"
            )
        allowed = serves_stock if self.stock is None else self.stock
        if not allowed:
            raise limit_refusal(
                "a message without an Order: this client serves PPSGD only; for a stock strategy "
                f"pass local_step to client_app or PPSGDClient, or set {STOCK} = true in the node "
                "config and local-step in the run config"
            )


LIMITS = {PREFIX + limit.name.replace("_", "-"): limit.name for limit in fields(Policy)}
KEYS = (STATE_DIR, USER, *LIMITS)


def delivers(order: Order | None) -> bool:
    """Whether an evaluation brings the last w, which everybody may have."""
    return order is not None and (order.last or order.asks == "nothing")


def owner_of(node: Mapping[str, Any]) -> tuple[Path, str] | None:
    """The state directory and the user that a node config names; None without a directory."""
    root = str(node.get(STATE_DIR, ""))
    if not root:
        return None
    user = str(node.get(USER, node.get("partition-id", "")))
    if not user:
        raise RefusedError(
            RefusalCode.NODE_CONFIG,
            f"node config: {STATE_DIR} is set and nothing says whose θ it is: add {USER}, or "
            "partition-id",
        )
    return Path(root), user


def _checked_value(key: str, value: Any) -> Any:
    """The value of a key, checked: a public key, a switch, or a number of at least 0."""
    if key == SERVER_KEY:
        text = str(value)
        try:
            public_key(text)
        except ValueError as error:
            raise ValueError(
                f"{key} must be a public key ed25519:BASE64, got {text[:16]!r}… ({error}): ask the "
                "training's operator for it"
            ) from None
        return text
    if key in (EVALUATE, STOCK, SECURE, COMPLETE):
        rule = f"{key} must be true or false"
        require(isinstance(value, bool), rule, value, "write it without quotes")
        return bool(value)
    rule = f"{key} must be a number of at least 0"
    require(is_number(value) and value >= 0, rule, value, "set it, or remove it for no limit")
    return float(value)
