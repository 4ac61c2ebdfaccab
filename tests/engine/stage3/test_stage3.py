"""Stage 3 against a plain one-process loop; many cases in one spawn of ranks."""

import math
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import functional

from tests.engine.models import HAS_MUON
from tests.engine.ranks import process_context, run_on_ranks
from tests.engine.stage3_models import (
    Block,
    Course,
    Language,
    Reading,
    decay_groups,
    make_batches,
    train_plainly,
)
from tests.engine.tensor_sizes import storage_bytes
from zerolab.errors import ConfigError, EngineError
from zerotrial.engine import Engine, initialize
from zerotrial.failures import reason_of

STEPS = 6
LEARNING_RATE = 2e-3
TOLERANCES = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 5e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Build = Callable[[], nn.Module]
Problems = dict[str, list[str]]


def seeded(build: Build, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def averaged(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / world()[1]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def make_engine(model: nn.Module, config: dict[str, Any] | None = None, **arguments: Any) -> Engine:
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        **(config or {}),
    }
    return initialize(model=model, config=content, **arguments)[0]


def train_engine(engine: Engine, batches: list[list[list[Any]]]) -> Course:
    """Losses are averaged over the ranks."""
    losses, norms = [], []
    for step in batches:
        total = 0.0
        for micro in step:
            loss = engine(*micro[world()[0]])
            total += loss.item() / len(step)
            engine.backward(loss)
            engine.step()
        losses.append(averaged(total))
        norms.append(engine.get_global_grad_norm() or 0.0)
    weights = {name: tensor.clone() for name, tensor in engine.stage.full_weights()}
    return Course(losses, norms, weights)


def train(
    build: Build, batches: list[list[list[Any]]], config: dict[str, Any] | None = None
) -> Course:
    rank, _ = world()
    model = seeded(build, seed=3 + rank)  # rank 0's weights are everyone's
    accumulation = {"gradient_accumulation_steps": len(batches[0])}
    engine = make_engine(
        model, {**accumulation, **(config or {})}, model_parameters=decay_groups(model)
    )
    course = train_engine(engine, batches)
    engine.close()
    return course


def compare(actual: Course, expected: Course, tolerance: float) -> list[str]:
    problems = []
    for name in ("losses", "norms"):
        pairs = zip(getattr(actual, name), getattr(expected, name), strict=True)
        for step, (a, b) in enumerate(pairs):
            # A norm is not averaged over a batch: its rounding is larger than a loss's.
            allowed = tolerance * (1 if name == "losses" else 20)
            if not abs(a - b) <= allowed * abs(b):
                problems.append(f"{name} at step {step}: {a} instead of {b}")
    for name, weight in actual.weights.items():
        far = (weight - expected.weights[name]).abs().max().item()
        if not far <= 20 * tolerance:
            problems.append(f"{name} is {far} off")
    return problems


def against_plain(
    build: Build,
    batches: list[list[list[Any]]],
    config: dict[str, Any] | None = None,
    optimizer: Any = adamw,
    tolerance: float = 1e-6,
    **plainly: Any,
) -> list[str]:
    """Train both ways and compare, on rank 0 alone."""
    actual = train(build, batches, config)
    if world()[0] != 0:
        return []
    expected = train_plainly(lambda: seeded(build), batches, optimizer, **plainly)
    return compare(actual, expected, tolerance)


def precisions() -> Iterator[tuple[str, list[str]]]:
    for precision, tolerance in TOLERANCES.items():
        for micro, clip in ((1, 0.0), (2, 0.3)):
            batches = make_batches(STEPS, micro, world()[1])
            config: dict[str, Any] = {"gradient_clipping": clip}
            if precision != "fp32":
                config[precision] = {"enabled": True}
            scale = 1.0
            if precision == "fp16":
                config["fp16"]["initial_scale_power"], scale = 10, 1024.0
            yield (
                f"{precision}, {micro} micro-batches, clipping {clip}",
                against_plain(
                    Language,
                    batches,
                    config,
                    tolerance=tolerance,
                    clip=clip,
                    dtype=DTYPES[precision],
                    scale=scale,
                ),
            )


class Branching(nn.Module):
    """Uses a part for some batches only, one twice, one never; trains only some of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(13, 8))
        for parameter in self.blocks[0].up.parameters():
            parameter.requires_grad_(False)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = functional.embedding(tokens, self.table) + self.shift
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        if tokens[0, 0] % 2:
            x = x + self.sometimes(x)
        return functional.cross_entropy((x @ self.table.T).flatten(0, 1).float(), targets.flatten())


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(13, 6), nn.LSTM(6, 6, batch_first=True, bidirectional=True)
        )
        self.body = nn.Sequential(nn.Conv1d(12, 5, 3), nn.GroupNorm(1, 5), nn.ReLU())
        self.last = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.layers(tokens)
        return (self.last(self.body(x.transpose(1, 2))) - targets.float().mean()).square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2))
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = functional.one_hot(tokens, 13).float()[:, :, :6]
        out = self.body(x.to(next(self.parameters()).dtype)).float()
        return (out - targets.float().mean()).square().mean()


def optimizers_and_modules() -> Iterator[tuple[str, list[str]]]:
    from zerotrial.extensions.optimizers.lamb import Lamb
    from zerotrial.extensions.optimizers.muon import MuonWithAdamW

    batches = make_batches(4, 2, world()[1])
    for name, cls, params in (
        ("Lamb", Lamb, {"lr": 0.01}),
        ("Muon", MuonWithAdamW, {"lr": 0.01}),
        ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ):
        if name == "Muon" and not HAS_MUON:
            continue
        config = {"optimizer": {"type": name, "params": params}}
        make = lambda groups, cls=cls, params=params: cls(groups, **params)  # noqa: E731 - short
        # Muon iterates in bf16, which amplifies rounding.
        tolerance = 1e-3 if name == "Muon" else 1e-6
        yield name, against_plain(Language, batches, config, make, tolerance=tolerance)
    yield (
        "some parameters are used on some ranks, some twice, some never",
        against_plain(Branching, batches),
    )
    yield "convolution, LSTM, attention", against_plain(Mixture, batches, tolerance=1e-5)
    bf16 = {"bf16": {"enabled": True}}
    stages = [train(Normed, batches, {**bf16, "zero_optimization": {"stage": s}}) for s in (3, 2)]
    yield "batch norms compute in fp32", compare(*stages, 2e-3)


def outside_reads() -> Iterator[tuple[str, list[str]]]:
    batches = make_batches(3, 2, world()[1])
    for name, config in (
        ("in fp32", {}),
        ("and recomputed", {"activation_checkpointing": {"enabled": True}}),
        ("from the host", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}),
    ):
        yield f"weights read outside {name}", against_plain(Reading, batches, config)
    dtype, bf16 = torch.bfloat16, {"bf16": {"enabled": True}}
    problems = against_plain(Reading, batches, bf16, tolerance=TOLERANCES["bf16"], dtype=dtype)
    yield "weights read outside in bf16", problems

    (((*_, batch),),) = make_batches(1, 1, world()[1])
    engine = make_engine(seeded(Reading), {"gradient_accumulation_steps": 2})
    loss, norms = engine(*batch), []
    engine.backward(loss, retain_graph=True)
    engine.step()
    engine.backward(loss)  # gathers what the first backward has freed
    engine.step()
    norms.append(engine.get_global_grad_norm())
    engine.close()
    plain = seeded(Reading)
    plain(*batch).backward()
    gradients = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    near = math.isclose(norms[0], float(gradients.norm()), rel_tol=1e-5)
    yield "a forward that reads outside has two backwards", [] if near else [f"{norms}"]
    kinds = {type(part._parameters) for part in engine.module.modules()}
    yield "a closed engine leaves plain modules", [] if kinds == {dict} else [f"{kinds}"]


def offloads() -> Iterator[tuple[str, list[str]]]:
    batches = make_batches(3, 2, world()[1])
    with tempfile.TemporaryDirectory() as files:
        in_files = {"device": "nvme", "nvme_path": files}
        for name, block in (
            ("parameters to the host", {"offload_param": {"device": "cpu"}}),
            ("states to the host", {"offload_optimizer": {"device": "cpu"}}),
            ("states to files", {"offload_optimizer": in_files}),
            ("both", {"offload_param": {"device": "cpu"}, "offload_optimizer": in_files}),
        ):
            config = {"zero_optimization": {"stage": 3, **block}, "bf16": {"enabled": True}}
            plain = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
            actual = train(Language, batches, config), train(Language, batches, plain)
            yield f"offloading {name} changes nothing", compare(*actual, 1e-7)


def behaviours() -> Iterator[tuple[str, list[str]]]:
    rank, ranks = world()
    batches = make_batches(3, 2, ranks)
    expected = train_plainly(lambda: seeded(Language), batches, adamw)

    model = seeded(Language)
    engine = make_engine(model, model_parameters=decay_groups(model))  # no accumulation
    norms = []
    for step in batches:
        with engine.no_sync():
            engine.backward(engine(*step[0][rank]) / 2)
        engine.backward(engine(*step[1][rank]) / 2)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    good = all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(norms, expected.norms, strict=True))
    yield "two backwards before one step add up", [] if good else [f"{norms} {expected.norms}"]

    before = {name: weight.clone() for name, weight in engine.stage.full_weights()}
    engine.backward(engine(*batches[0][0][rank]) * (math.inf if rank == 0 else 1.0))
    result = engine.step()
    same = all(torch.equal(w, before[name]) for name, w in engine.stage.full_weights())
    dropped = same and not result.updated and engine.skipped_steps == 1
    yield "an overflow on one rank is dropped on all", [] if dropped else [f"{result} {same}"]

    seen: dict[int, float] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.update({id(p): float(p.grad.double().square().sum())})
        )
        for parameter in engine.module.parameters()
    ]
    engine.backward(engine(*batches[0][0][rank]))
    engine.step()
    for hook in hooks:
        hook.remove()
    good = len(seen) == len(hooks) and sum(seen.values()) > 0
    yield "a hook on a parameter sees the full gradient", [] if good else [f"{seen}"]

    plain = seeded(Language)
    problems = []
    for _ in range(2):
        plain.load_state_dict(dict(engine.stage.full_weights()), strict=False)
        plain.head.weight = plain.embed.weight
        with torch.no_grad():
            a, b = engine(*batches[1][0][rank]).item(), plain(*batches[1][0][rank]).item()
        if not math.isclose(a, b, rel_tol=1e-6):
            problems.append(f"{a} instead of {b}")
        engine.backward(engine(*batches[0][0][rank]))
        engine.step()
    yield "evaluation sees the newest weights", problems

    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.mul_(0.5)
        plain.load_state_dict(dict(engine.stage.full_weights()), strict=False)
        a, b = engine(*batches[1][0][rank]).item(), plain(*batches[1][0][rank]).item()
    good = math.isclose(a, b, rel_tol=1e-6)
    yield "weights that the user writes to are seen by all", [] if good else [f"{a} not {b}"]

    covered: dict[str, list[tuple[int, int]]] = {}
    actual = [(p.name, p.start, p.stop, sorted(p.tensors)) for p in engine.stage.pieces()]
    everyone: list[Any] = [actual] * ranks
    if ranks > 1:
        dist.all_gather_object(everyone, actual)
    for name, start, stop, _ in sorted(piece for pieces in everyone for piece in pieces):
        covered.setdefault(name, []).append((start, stop))
    gaps = []
    for name, parameter in seeded(Language).named_parameters():
        ends = [0, *(stop for _, stop in covered[name])]
        starts = [*(start for start, _ in covered[name]), parameter.numel()]
        if starts != ends:
            gaps.append(f"{name}: {covered[name]}")
    yield "the pieces of all ranks cover every parameter once", gaps
    kinds = {tuple(kinds) for *_, kinds in actual}
    right = kinds == {("exp_avg", "exp_avg_sq", "master")}
    yield "a piece has its master and states", [] if right else [str(kinds)]
    engine.close()


def two_engines(zero: dict[str, Any] | None = None) -> Iterator[tuple[str, list[str]]]:
    """One engine's loss runs through another's model, as a generator's does."""
    rank, ranks = world()
    batches = make_batches(3, 1, ranks)

    def build(seed: int) -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), seed)

    def losses(make: Any, judge: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return judge(make(x).detach()).square().mean(), judge(make(x)).sub(1.0).square().mean()

    config = {"zero_optimization": {"stage": 3, **(zero or {})}}
    maker, judge = (make_engine(build(seed), config, optimizer=sgd) for seed in (1, 2))
    plain = [build(seed) for seed in (1, 2)]
    steppers = [sgd(model.parameters()) for model in plain]
    problems = []
    for step in batches:
        for model in plain:
            model.zero_grad()
        for tokens, _ in step[0]:
            of_judge, of_maker = losses(*plain, tokens.float())
            for loss, model in ((of_judge, plain[1]), (of_maker, plain[0])):
                grads = torch.autograd.grad(loss / ranks, list(model.parameters()))
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.grad = g if p.grad is None else p.grad + g
        for stepper in steppers:
            stepper.step()
        of_judge, of_maker = losses(maker, judge, step[0][rank][0].float())
        judge.backward(of_judge)
        maker.backward(of_maker)
        judge.step()
        maker.step()
    for name, engine, model in (("maker", maker, plain[0]), ("judge", judge, plain[1])):
        for key, weight in engine.stage.full_weights():
            far = (weight - model.get_parameter(key)).abs().max().item()
            if far > 1e-6:
                problems.append(f"{name}.{key} is {far} off")
        engine.close()
    yield "gradients of another engine's loss are dropped", problems


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Towers(nn.Module):
    """Two encoders and a head, called by methods other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Tower(nn.Embedding(13, 8))
        self.sights = Tower(nn.Linear(3, 8))
        self.value = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def read(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) * self.scale

    def see(self, sight: Tensor) -> Tensor:
        seen: Tensor = self.sights(sight)
        return seen

    def forward(self, tokens: Tensor, sight: Tensor) -> Tensor:
        return (self.read(tokens) - self.see(sight)).square().mean()


class Tower(nn.Module):
    def __init__(self, enter: nn.Module) -> None:
        super().__init__()
        self.enter = enter
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.leave, self.gain = nn.LayerNorm(8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, *, left: bool = False) -> Tensor:
        if not left:  # a part that calls itself
            return self.leave(self(x, left=True)).mean(1) * self.gain  # type: ignore[no-any-return]
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def methods() -> Iterator[tuple[str, list[str]]]:
    """Return losses of calls to methods, to a submodule, and to both with forward."""
    rank, ranks = world()
    batches = make_batches(4, 2, ranks)

    def loss_of(model: Any, inner: Any, step: int, tokens: Tensor, other: Tensor) -> Tensor:
        sight = functional.one_hot(other % 3, 3).float()
        with torch.no_grad():
            aim = model.see(sight)  # gathers, and frees
        if step == 0:
            return inner.value(inner.see(sight).detach()).square().mean()
        loss = (model.read(tokens) @ inner.see(sight).T - 1).square().mean()
        if step == 1:
            with pytest.raises(IndexError):
                model.read(tokens + 100)
            return loss + (model.value(model.read(other)) - aim.mean()).square().mean()
        return loss + model(other, sight) if step == 2 else model(tokens, sight)

    def half(parameters: Any) -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.data.mul_(0.5)

    for stage in range(4):
        plain = seeded(Towers)
        stepper = sgd(plain.parameters())
        config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}
        engine = make_engine(seeded(Towers), config, optimizer=sgd)
        problems = []
        for number, step in enumerate(batches):
            plain.zero_grad()
            for micro in step:
                for batch in micro:
                    (loss_of(plain, plain, number, *batch) / ranks / 2).backward()
                engine.backward(loss_of(engine, engine.module, number, *micro[rank]))
                engine.step()
            stepper.step()
            if stage == 3:  # a manual write is visible to a submodule, too
                half(plain.parameters())
                half(engine.module.parameters())
        for name, weight in engine.stage.full_weights():
            far = (weight - plain.get_parameter(name)).abs().max().item()
            if not far <= 1e-6:
                problems.append(f"{name} is {far} off")
        engine.close()
        sums = engine.module.value(engine.module.see(torch.ones(2, 3, 3))).sum()
        sums.backward()  # plain again
        if engine.module.value.weight.grad is None:
            problems.append("a closed engine's part is not as it was")
        yield f"methods beside forward train at stage {stage}", problems


def cost() -> Iterator[tuple[str, list[str]]]:
    """Return traffic and memory of a model whose blocks are larger than its root."""
    rank, ranks = world()
    for precision, width in (("fp32", 4), ("bf16", 2)):
        model = Language(width=32, blocks=8)
        numel = sum(p.numel() for p in model.parameters())
        block = sum(p.numel() for p in model.blocks[0].parameters())
        config = {} if precision == "fp32" else {precision: {"enabled": True}}
        engine = make_engine(model, config)
        for step in make_batches(2, 1, ranks):
            engine.stage._comm.traffic.clear()
            engine.backward(engine(*step[0][rank]))
            sizes = {kind: storage_bytes(t) for kind, t in engine.stage.tensors_by_kind().items()}
            engine.step()
        moved = engine.stage._comm.traffic.total / numel
        expected = 3.0 if ranks > 1 else 0.0
        near = abs(moved - expected) <= 0.02 * expected
        yield f"{precision}: 3P elements move in a step", [] if near else [f"{moved} P"]
        states = sum(sizes[kind] for kind in ("parameters", "master", "gradients", "optimizer"))
        right = abs(states - 16 * numel / ranks) <= 0.02 * 16 * numel / ranks
        yield f"{precision}: a rank holds 16/N bytes", [] if right else [f"{sizes}, {numel}"]
        # Three buffers of the largest block, and the shards as the other ranks read them.
        room = 1.05 * (3 * 4 * block + width * numel / ranks) if ranks > 1 else 0
        fits = sizes["buckets"] <= room
        yield f"{precision}: buckets are a few blocks", [] if fits else [f"{sizes}, {room}"]
        engine.close()


def every_case() -> Problems:
    actual: Problems = {}
    cases = [precisions, cost]
    if world()[1] < 4:  # independent of the number of ranks
        cases += [optimizers_and_modules, behaviours, methods, two_engines, offloads, outside_reads]
    for case in cases:
        actual.update(case())
    return {name: problems for name, problems in actual.items() if problems}


@pytest.mark.slow
def test_one_process_trains_like_a_plain_loop() -> None:
    assert every_case() == {}


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_ranks_train_like_one_process(ranks: int) -> None:
    for problems in run_on_ranks(every_case, ranks):
        assert problems == {}


@pytest.mark.processes
def test_single_process_environment_is_restored() -> None:
    with ProcessPoolExecutor(1, process_context()) as pool:
        pool.submit(open_and_close_engines).result()


def open_and_close_engines() -> None:
    first, second = make_engine(seeded(Language)), make_engine(seeded(Language))
    assert dist.is_initialized()
    first.close()
    (((batch,),),) = make_batches(1, 1, 1)
    second.backward(second(*batch))
    second.step()
    second.close()
    second.close()
    assert not dist.is_initialized()
    make_engine(seeded(Language)).close()
    assert not dist.is_initialized()


def test_unshardable_models_are_refused_with_supported_stages() -> None:
    model = nn.Module()
    model.table = nn.Embedding(5, 5, sparse=True)
    with pytest.raises(ConfigError) as caught:
        make_engine(model)
    assert caught.value.problems == [
        "module table: sparse gradients cannot be sharded; set sparse=False"
    ]
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3).double())
    with pytest.raises(ConfigError, match=r"parameters in one type.*stage 0, 1 or 2"):
        make_engine(model)


class Reaching(nn.Module):
    """Uses the weight of a block, which it finds by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, dict(self.named_parameters())["blocks.0.weight"]).sum()


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(ConfigError, match=r"stage: 3 needs torch 2\.7 or newer, got torch 2\.6"):
        make_engine(seeded(Language))


def test_weight_read_by_name_outside_its_module_is_explained() -> None:
    engine = make_engine(Reaching())
    with pytest.raises(EngineError, match="reads a weight outside the module that owns it"):
        engine(torch.ones(2, 4))
    engine.close()


def test_unused_parameter_is_named_if_configured() -> None:
    zero = {"stage": 3, "ignore_unused_parameters": False}
    engine = make_engine(Branching(), {"zero_optimization": zero})
    tokens = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(EngineError, match=r"without a gradient: .*never.weight"):
        engine.backward(engine(tokens, tokens))
    engine.close()


class Routed(nn.Module):
    """Each rank runs different blocks of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.ways = Ways()
        self.leave = nn.Linear(4, 1)

    def forward(self, x: Tensor, way: int) -> Tensor:
        loss: Tensor = self.leave(self.ways(self.enter(x), way)).mean()
        return loss


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, way: int) -> Tensor:
        out: Tensor = self.blocks[way](x)
        return out


def _ranks_take_different_ways() -> dict[str, Any]:
    actual: dict[str, Any] = {}
    for leaves in ([], ["Ways"]):
        torch.manual_seed(0)
        engine = initialize(
            model=Routed(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": 3, "leaf_module": {"classes": leaves}},
            },
        )[0]
        key = ",".join(leaves)
        try:
            for step in range(2):
                for way in (0, 1):
                    with torch.no_grad():
                        engine(torch.ones(1, 4), way)
                engine.backward(engine(torch.ones(1, 4), (dist.get_rank() + step) % 2))
                engine.step()
        except EngineError as error:
            actual[key] = str(error)
        else:
            actual[key] = engine.get_global_grad_norm()
        engine.close()
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ((model(torch.ones(1, 4), 0) + model(torch.ones(1, 4), 1)) / 2).backward()
        optimizer.step()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        actual["expected"] = float(torch.cat(gradients).double().norm())
    return actual


@pytest.mark.processes
def test_ranks_with_different_forwards_never_mix_gradients() -> None:
    for actual in run_on_ranks(_ranks_take_different_ways, 2):
        assert "leaf_module.classes" in actual[""]
        assert actual["Ways"] == pytest.approx(actual["expected"], rel=1e-6)


class Encoder(Ways):
    """Has another method that begins with a weight of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](self.blocks[0](x + self.shift)).sum()
        return out


def test_registered_method_beside_forward_gathers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Encoder()
    expected = model.encode(torch.ones(1, 4)).item()
    engine = make_engine(model)
    with pytest.raises(RuntimeError) as caught:
        engine.encode(torch.ones(1, 4))
    assert "register_fsdp_forward_method(engine.module" in reason_of(caught.value, tmp_path)
    register_fsdp_forward_method(engine.module, "encode")
    loss = engine.encode(torch.ones(1, 4))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    engine.backward(loss)
    assert engine.step().updated
