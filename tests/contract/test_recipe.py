"""``PPSGD.auto``: one w by every way to run it, what it charges, what it brings to each device."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters

from flwr_ppsgd import PPSGD, AdditiveLinear, Minibatches, Order, client_app, personalize
from flwr_ppsgd.legacy import PPSGDClient, PPSGDStrategy
from flwr_ppsgd.simulation import InProcessGrid
from tests.contract.command import ppsgd
from tests.contract.hostile_clients import published_by
from tests.contract.targets import Floats, flat, run_legacy, user_of
from tests.support.recipe_golden import NAMES, needs_golden, recorded, task_of

USERS = 12
ROWS = 9  # of each user; the last two are for testing
TRAINED = 7
EPSILON, DELTA, SEED = 40.0, 1e-3, 5
MODEL = "ppsgd-model"  # the record of a personal model, in a node's state
WAYS = ("regression", "classification", "sparse", "sparse classes")


class Users:
    """Rows of made-up users, as a file has them and as an app sees them.

    Args:
        way: one of ``WAYS``.
    """

    def __init__(self, way: str) -> None:
        source = np.random.default_rng(3)
        self.way = way
        self.task = "classification" if "class" in way else "regression"
        self.owner = np.repeat(np.arange(USERS), ROWS)
        self.test = np.arange(len(self.owner)) % ROWS >= TRAINED
        rare = "sparse" in way
        width = 20 if rare else 4
        self.raw = 10 + 3 * source.normal(size=(len(self.owner), width))
        if rare:
            self.raw = np.where(source.random(self.raw.shape) < 0.2, self.raw, 0.0)
        truth = source.normal(size=(width, 3)) + 0.3 * source.normal(size=(USERS, width, 3))
        scores = np.einsum("nd,ndk->nk", self.raw - self.raw.mean(axis=0), truth[self.owner])
        self.amounts = scores[:, 0] + 50 * source.normal(size=USERS)[self.owner]
        self.classes = scores.argmax(axis=1)
        self.outputs = 3 if self.task == "classification" else 1
        self.kinds = ["sparse" if rare else "number"] * width
        self.rows = self.raw
        if self.task == "classification":
            self.rows = np.hstack([self.raw, np.ones((len(self.raw), 1))])
            self.kinds.append("as-is")

    @property
    def sparse(self) -> tuple[int, ...]:
        return tuple(at for at, kind in enumerate(self.kinds) if kind == "sparse")

    @property
    def w(self) -> ArrayRecord:
        return ArrayRecord([np.zeros((len(self.kinds), self.outputs))])

    @property
    def targets(self) -> Floats:
        if self.task == "regression":
            return np.asarray(self.amounts[:, None])
        return np.asarray(np.eye(self.outputs)[self.classes])

    def learner(self, context: Context) -> AdditiveLinear:
        user = user_of(context)
        own = (self.owner == user) & ~self.test
        measured = (self.owner == user) & self.test
        return AdditiveLinear(
            Minibatches(self.rows[own], self.targets[own], 3, seed=0, user=user),
            len(self.kinds),
            self.outputs,
            test=(self.rows[measured], self.targets[measured]),
            task=self.task,  # type: ignore[arg-type]
            kinds=self.kinds,
        )

    def legacy_client(self, context: Context) -> Client:
        return PPSGDClient(self.learner(context), context).to_client()

    def auto(self, **more: Any) -> dict[str, Any]:
        wanted = {"population": USERS, "epsilon": EPSILON, "delta": DELTA, "insecure_seed": SEED}
        return {**wanted, "task": self.task, "sparse": self.sparse, **more}

    def grid(self, app: ClientApp | None = None) -> InProcessGrid:
        return InProcessGrid(app or client_app(self.learner), USERS)

    def write(self, directory: Path) -> Path:
        """A file in which these columns have these kinds."""
        path = directory / f"{self.way}.npz"
        y = self.classes if self.task == "classification" else self.amounts
        x: dict[str, Any] = {"x": self.raw}
        if self.sparse:
            counts = (self.raw != 0).sum(axis=1)
            x = {
                "data": self.raw[self.raw != 0],
                "indices": np.nonzero(self.raw)[1],
                "indptr": np.concatenate([[0], np.cumsum(counts)]),
                "shape": np.array(self.raw.shape),
            }
        np.savez(path, user=self.owner, y=y, test=self.test, **x)
        return path


def by_command(users: Users, directory: Path, engine: str) -> dict[str, Floats]:
    """What ``ppsgd run --data`` publishes."""
    out = directory / engine
    ended = ppsgd(
        "run",
        "--data",
        users.write(directory),
        *("--task", users.task, "--engine", engine, "--out", out),
        *(part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")),
    )
    assert ended.status == 0, ended.err
    with np.load(out / "model.npz") as model:
        return {name: model[name] for name in model.files}


SETTINGS = {"epsilon": EPSILON, "delta": DELTA, "insecure-seed": SEED}


def by_legacy(users: Users, client_fn: Callable[[Context], Client] | None = None) -> Floats:
    """w, through Flower's own legacy loop."""
    strategy = PPSGDStrategy.auto(
        initial_parameters=ndarrays_to_parameters(users.w.to_numpy_ndarrays()),
        **users.auto(),
    )
    published = published_by(strategy)
    grid = users.grid(ClientApp(client_fn=client_fn or users.legacy_client))
    run_legacy(strategy, grid, strategy.server_config())
    return np.asarray(published[-1].reshape(-1))


# --- one w


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_w_to_the_last_bit(way: str, tmp_path: Path) -> None:
    users = Users(way)
    strategy = PPSGD.auto(**users.auto())
    result = strategy.start(users.grid(), users.w)
    published = strategy.published(result.arrays)
    w = flat(result.arrays)
    assert np.abs(w).max() > 0
    np.testing.assert_array_equal(by_legacy(users), w)
    model = by_command(users, tmp_path, "cohort")
    np.testing.assert_array_equal(model.pop("w").reshape(-1), w)
    assert len(model.pop("schema-sha256")) == 32
    assert len(model) == 3
    for name, array in model.items():
        np.testing.assert_array_equal(array, published[name])


# --- the recorded problems without noise, against plain formulas


class Everything:
    """A user's rows, of which there may be none."""

    def __init__(self, x: Floats, y: Floats) -> None:
        self.num_examples = len(x)
        self._rows = (x, y)

    def __call__(self, visit: int) -> tuple[Floats, Floats]:  # noqa: ARG002 - all at every visit
        return self._rows

    def everything(self) -> tuple[Floats, Floats]:
        return self._rows


def scaled(x: Floats, numbers: Floats) -> Floats:
    """Columns of numbers in own deviations around the own mean, cut at 5; constant ones 0."""
    out = x.copy()
    for j in np.flatnonzero(numbers) if len(x) else ():
        around = x[:, j] - x[:, j].mean()
        deviation = np.sqrt(np.mean(around**2))
        constant = np.ptp(x[:, j]) == 0
        out[:, j] = 0.0 if constant else np.clip(around / deviation, -5, 5)
    return out


def solution(x: Floats, y: Floats, w: Floats) -> Floats:
    """X'(XX' + λI)⁻¹(Y − Xw), λ = .001·tr."""
    trace = np.trace(x @ x.T)
    if trace == 0:
        return np.zeros_like(w)
    kernel = x @ x.T + 0.001 * trace * np.eye(len(x))
    return np.asarray(x.T @ np.linalg.solve(kernel, y - x @ w))


def geometric_mean(values: list[float]) -> float:
    known = [np.clip(math.log2(value) / 8, -1, 1) for value in values if 0 < value < math.inf]
    return float(2 ** (8 * np.mean(known)))


def clipped(vector: Floats) -> Floats:
    return vector / max(1.0, float(np.linalg.norm(vector)))


def by_formulas(golden: dict[str, Any], rounds: int) -> Floats:
    """w of the whole training."""
    regression = golden["task"] == "regression"
    outputs = golden["outputs"]
    own = [golden["user"] == user for user in range(golden["users"])]
    raw = [golden["rows"][rows] for rows in own]
    targets = [golden["targets"][rows] for rows in own]
    xs = [scaled(x, golden["numbers"]) for x in raw]
    if regression:
        spreads = [float(np.std(y, ddof=1)) if len(y) > 1 else math.nan for y in targets]
        unit = geometric_mean(spreads)
        xs = [x - x.mean(axis=0) if len(x) else x for x in xs]
        ys = []
        for y in targets:
            around = y - y.mean() if len(y) else y
            v = math.sqrt((around @ around + 4 * unit**2) / (max(len(y), 1) + 3))
            ys.append(around[:, None] / v)
    else:
        xs = [np.hstack([x, np.ones((len(x), 1))]) for x in xs]
        ys = [np.eye(outputs)[y.astype(int)] - 1 / outputs for y in targets]
    sparse = np.append(golden["sparse"], [] if regression else [False]).astype(bool)
    w = np.zeros((len(sparse), outputs))
    size = 1.0
    share = np.ones(len(sparse))
    if sparse.any() or not regression:
        sizes = [float(np.linalg.norm(solution(x, y, w))) for x, y in zip(xs, ys, strict=True)]
        size = geometric_mean(sizes)
    if sparse.any():
        has = [x[:, golden["sparse"]].any(axis=0).astype(float) for x in raw]
        count = geometric_mean([math.sqrt(columns.sum()) for columns in has])
        counted = count * sum(clipped(columns / count) for columns in has) / len(own)
        share[sparse] = np.clip(counted, 1 / len(own), 1.0)
    for _ in range(rounds):
        found = [clipped(solution(x, y, w) / size) for x, y in zip(xs, ys, strict=True)]
        w = w + size * sum(found) / len(own) / share[:, None]
    return w


@needs_golden
@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_problems_without_noise_are_trained_as_the_formulas_say(name: str) -> None:
    golden = recorded(name)
    task = task_of(golden)
    ones = task == "classification"
    named = np.where(golden["sparse"], "sparse", np.where(golden["numbers"], "number", "as-is"))
    kinds = [*named.tolist(), *["as-is"] * ones]

    def learner(context: Context) -> AdditiveLinear:
        own = golden["user"] == user_of(context)
        x, y = golden["rows"][own], golden["targets"][own][:, None]
        if ones:
            x = np.hstack([x, np.ones((len(x), 1))])
            y = np.eye(golden["outputs"])[y[:, 0].astype(int)]
        batches = Everything(x, y)
        return AdditiveLinear(batches, len(kinds), golden["outputs"], task=task, kinds=kinds)

    strategy = PPSGD.auto(
        population=golden["users"],
        epsilon=math.inf,
        delta=1e-5,
        task=task,
        sparse=np.flatnonzero(golden["sparse"]).tolist(),
    )
    grid = InProcessGrid(client_app(learner), golden["users"])
    w = flat(strategy.start(grid, ArrayRecord([np.zeros((len(kinds), golden["outputs"]))])).arrays)
    expected = by_formulas(golden, 8).reshape(-1)
    # a sum is a whole multiple of 2⁻³² of its bound, and sparse columns are divided by shares
    np.testing.assert_allclose(w, expected, rtol=1e-6, atol=1e-7)


# --- what is charged


def counting(users: Users, asked: list[str]) -> ClientApp:
    """Remembers what every user is asked for."""

    class Watched(AdditiveLinear):
        def spread(self) -> float:
            asked.append("unit")
            return super().spread()

        def own_columns(self) -> Floats:
            asked.append("columns")
            return super().own_columns()

        def solution(self, w: Floats, order: Order) -> Floats:
            asked.append(order.asks)
            return super().solution(w, order)

    def learner(context: Context) -> AdditiveLinear:
        made = users.learner(context)
        made.__class__ = Watched
        return made

    return client_app(learner)


@pytest.mark.parametrize("way", WAYS)
def test_all_that_is_released_is_charged_and_within_epsilon(way: str) -> None:
    users = Users(way)
    strategy = PPSGD.auto(**users.auto(insecure_seed=None))
    strategy.start(users.grid(), users.w)
    recipe = strategy.training.recipe
    assert recipe is not None
    assert len(recipe.before) == dict(zip(WAYS, (1, 1, 4, 3), strict=True))[way]
    charged = dict(strategy.ledger.releases)
    counted = {strategy.release: recipe.rounds}
    for release in recipe.before.values():
        counted[release] = counted.get(release, 0) + 1
    assert charged == counted
    assert 0.99 * EPSILON < strategy.ledger.epsilon() <= EPSILON


def test_sampled_rounds_share_the_budget_with_the_numbers_before_them() -> None:
    users = Users("regression")
    strategy = PPSGD.auto(**users.auto(rate=0.5, insecure_seed=None))
    strategy.start(users.grid(), users.w)
    assert [times for _, times in strategy.ledger.releases] == [1, 40]
    assert 0.99 * EPSILON < strategy.ledger.epsilon() <= EPSILON


def test_the_mean_of_sampled_rounds_is_near_the_w_of_everyone() -> None:
    """Without noise. Half of the users are drawn, and w is the mean over the second half."""
    users = Users("regression")

    def w(**more: Any) -> Floats:
        strategy = PPSGD.auto(**users.auto(epsilon=math.inf, **more))
        return flat(strategy.start(users.grid(), users.w).arrays)

    everyone = w()
    assert np.linalg.norm(w(rate=0.5) - everyone) < 0.1 * np.linalg.norm(everyone)


def test_a_restart_after_the_first_round_asks_nobody_for_numbers_again(tmp_path: Path) -> None:
    users = Users("sparse")
    asked: list[str] = []

    def stop(round_: int, _: Any) -> None:
        if round_ == 1:
            raise KeyboardInterrupt

    first = PPSGD.auto(**users.auto(checkpoint_dir=tmp_path))
    with pytest.raises(KeyboardInterrupt):
        first.start(users.grid(counting(users, asked)), users.w, on_round=stop)
    first.close()
    assert set(asked) == {"unit", "size", "columns", "solution"}
    assert asked.count("unit") == USERS
    asked.clear()
    again = PPSGD.auto(**users.auto(checkpoint_dir=tmp_path))
    resumed = again.start(users.grid(counting(users, asked)), users.w)
    assert set(asked) == {"solution"}
    whole = PPSGD.auto(**users.auto())
    expected = whole.start(users.grid(), users.w)
    np.testing.assert_array_equal(flat(resumed.arrays), flat(expected.arrays))
    assert dict(again.ledger.releases) == dict(whole.ledger.releases)


@pytest.mark.parametrize("changes", [{"epsilon": 20.0}, {"delta": 1e-4}, {"population": 13}])
def test_a_restart_with_another_budget_is_refused_by_name(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    users = Users("regression")
    first = PPSGD.auto(**users.auto(checkpoint_dir=tmp_path))
    first.start(users.grid(), users.w)
    first.close()
    again = PPSGD.auto(**users.auto(checkpoint_dir=tmp_path, **changes))
    with pytest.raises(ValueError, match="other privacy settings"):
        again.start(users.grid(), users.w)
    assert again.ledger.rounds == first.ledger.rounds


# --- delivery


def kept_by(grid: InProcessGrid) -> dict[int, dict[str, Any]]:
    """The personal model in each node's state, by user; none if a node has none."""
    found = {}
    for node in grid.get_node_ids():
        context = grid.context(node)
        if MODEL in context.state:
            record = context.state.array_records[MODEL]
            found[user_of(context)] = {name: array.numpy() for name, array in record.items()}
    return found


def check_delivered(users: Users, grid: InProcessGrid, published: dict[str, Any]) -> None:
    """Every node holds the model that follows from what was published."""
    kept = kept_by(grid)
    assert sorted(kept) == list(range(USERS))
    for node in grid.get_node_ids():
        context = grid.context(node)
        mixture = personalize(published, users.learner(context)).mixture
        assert mixture is not None
        for name, array in mixture.to_arrays().items():
            np.testing.assert_array_equal(kept[user_of(context)][name], array)


@pytest.mark.parametrize("way", WAYS)
def test_every_device_ends_with_the_model_of_the_engine(way: str, tmp_path: Path) -> None:
    """Without evaluation."""
    users = Users(way)
    grid = users.grid()
    PPSGD.auto(**users.auto()).start(grid, users.w)
    check_delivered(users, grid, by_command(users, tmp_path, "cohort"))


def test_the_last_w_has_one_reply_from_all_whatever_happens_on_a_device() -> None:
    """Whether a model can be made may depend on the data, and the server chooses w."""
    users = Users("regression")
    replies: list[tuple[int, Message]] = []

    class Failing(AdditiveLinear):
        def personal_model(self, *_: Any) -> Any:
            raise RuntimeError("these rows have no model")

    def learner(context: Context) -> AdditiveLinear:
        made = users.learner(context)
        if user_of(context) == 0:
            made.__class__ = Failing
        return made

    app = client_app(learner)

    def heard(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "evaluate":
            replies.append((user_of(context), reply))
        return reply

    grid = InProcessGrid(heard, USERS)  # type: ignore[arg-type]
    PPSGD.auto(**users.auto()).start(grid, users.w)
    assert sorted(user for user, _ in replies) == list(range(USERS))
    assert all(reply.has_content() and len(reply.content) == 0 for _, reply in replies)
    assert sorted(kept_by(grid)) == list(range(1, USERS))


def test_before_the_first_round_nobody_tells_whether_a_learner_can_be_made() -> None:
    """It may depend on the data; what cannot be made counts as zero."""
    users = Users("regression")
    replies: dict[int, Message] = {}

    def learner(context: Context) -> AdditiveLinear:
        if user_of(context) == 0:
            raise RuntimeError("rows that cannot be read")
        return users.learner(context)

    app = client_app(learner)

    def heard(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "query":
            replies[user_of(context)] = reply
        return reply

    grid = InProcessGrid(heard, USERS)  # type: ignore[arg-type]
    PPSGD.auto(**users.auto()).start(grid, users.w)
    assert 0 in replies
    assert all(reply.has_content() and len(reply.content) == 0 for reply in replies.values())


def test_in_the_legacy_api_too_the_last_w_is_answered_with_nothing() -> None:
    """Evaluation is off: w comes to everybody, and no measure leaves."""
    users = Users("regression")
    replies: list[Any] = []

    class Heard(PPSGDClient):
        def evaluate(self, *arguments: Any) -> Any:
            replies.append(super().evaluate(*arguments))
            return replies[-1]

    by_legacy(users, lambda context: Heard(users.learner(context), context).to_client())
    assert replies == [(0.0, 0, {})] * USERS


def test_started_again_it_charges_nothing_and_delivers(tmp_path: Path) -> None:
    users = Users("regression")
    first = PPSGD.auto(**users.auto(checkpoint_dir=tmp_path))
    result = first.start(users.grid(), users.w)
    first.close()
    again = PPSGD.auto(**users.auto(checkpoint_dir=tmp_path))
    grid = users.grid()
    assert kept_by(grid) == {}
    asked: list[str] = []
    grid = users.grid(counting(users, asked))
    again.start(grid, users.w)
    assert asked == []
    assert again.ledger == first.ledger
    check_delivered(users, grid, again.published(result.arrays))


def test_somebody_without_targets_gets_classes_by_w_alone_and_no_amounts(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    x = source.normal(size=(240, 2))
    lines = [f"u{at // 12},{a},{b},{a + b}" for at, (a, b) in enumerate(x.tolist())]
    words = [f"{line},{'yes' if a > 0 else 'no'}" for line, a in zip(lines, x[:, 0], strict=True)]
    (tmp_path / "old.csv").write_text("\n".join(["user,a,b,sum,word", *words]))
    (tmp_path / "new.csv").write_text("user,a,b,sum,word\nnew,2,0,,\nnew,-2,0,,\n")
    told = {}
    for target, other in (("word", "sum"), ("sum", "word")):
        out = tmp_path / target
        settings = ("--set", f"epsilon={EPSILON}", "--set", f"delta={DELTA}")
        columns = ("--user", "user", "--target", target, "--exclude", other)
        data = ("--data", tmp_path / "old.csv")
        assert ppsgd("run", *data, *columns, *settings, "--out", out).status == 0
        found = out / "predictions.csv"
        told[target] = ppsgd("predict", out, "--data", tmp_path / "new.csv", "--out", found)
    assert told["word"].status == 0, told["word"].err
    lines = (tmp_path / "word" / "predictions.csv").read_text().splitlines()
    assert lines[1:] == ["2,new,yes,shared alone", "3,new,no,shared alone"]
    assert told["sum"].status == 2
    assert "user 'new' is new and has no row with a target" in told["sum"].err


# --- what it is worth


def fares(related: bool, population: int, seed: int) -> dict[str, float]:
    """RMSE of users with 12 rows in 6 columns."""
    source = np.random.default_rng(seed)
    common = source.normal(size=6) * related

    def learner(context: Context) -> AdditiveLinear:
        user = user_of(context)
        own = np.random.default_rng([seed, user])
        truth = common + (0.3 if related else 1.0) * own.normal(size=6)
        x = own.normal(size=(212, 6))
        y = (x @ truth + 0.7 * own.normal(size=212))[:, None]
        batches = Minibatches(x[:12], y[:12], 12, seed=0, user=user)
        return AdditiveLinear(batches, 6, test=(x[12:], y[12:]), kinds=["number"] * 6)

    strategy = PPSGD.auto(
        population=population,
        epsilon=2.0,
        delta=1e-3,
        task="regression",
        evaluate_every=100,
        insecure_seed=seed,
    )
    grid = InProcessGrid(client_app(learner), population)
    result = strategy.start(grid, ArrayRecord([np.zeros((6, 1))]))
    (*_, last) = result.evaluate_metrics_clientapp.values()
    names = ("loss", "local_loss", "shared_loss")
    return {name: math.sqrt(2 * float(last[name])) for name in names}  # type: ignore[arg-type]


def test_related_users_gain_over_learning_alone() -> None:
    rmse = fares(related=True, population=200, seed=1)
    assert rmse["loss"] < 0.97 * rmse["local_loss"]
    assert rmse["loss"] < rmse["shared_loss"]


def test_unrelated_users_lose_less_than_half_a_percent() -> None:
    rmse = fares(related=False, population=200, seed=2)
    assert rmse["loss"] < 1.005 * rmse["local_loss"]
