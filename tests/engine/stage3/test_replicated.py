"""Parameters that stage 3 does not shard, against plain torch in one process."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import Engine

SAMPLES, STEPS = 8, 4


class Contrastive(nn.Module):
    """Like CLIP: two towers, a temperature, a tied scalar, a frozen one, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(6, 5)
        self.logit_scale = nn.Parameter(torch.tensor(1.3))
        self.gate = nn.Module()
        self.gate.alpha = nn.Parameter(torch.tensor(0.7))
        self.gate.beta = self.gate.alpha
        self.offset = nn.Parameter(torch.tensor(0.25), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        images = nn.functional.normalize(self.image(x).float(), dim=1)
        two = nn.functional.normalize(self.text(x).float(), dim=1)
        similar = self.logit_scale.exp() * (images * two).sum(1) * self.gate.alpha
        return (similar + self.gate.beta - self.offset + self.empty.sum()).square().mean()


class Scalars(nn.Module):
    """No parameter has a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.tensor(v)) for v in (0.5, -1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).square().mean()


def inputs(step: int) -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step))


def mesh_position() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_engine(
    stage: int,
    kind: str = "AdamW",
    model: type[nn.Module] = Contrastive,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> Engine:
    torch.manual_seed(0)
    weight_decay = {"weight_decay": 0.1}
    return zerotrial.initialize(
        model=model(),
        config={
            "train_batch_size": SAMPLES,
            "optimizer": {"type": kind, "params": {"lr": 0.05, **weight_decay}},
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage, **(zero or {})},
            **more,
        },
    )[0]


def train(engine: Engine, steps: range = range(STEPS)) -> list[float]:
    rank, ranks = mesh_position()
    norms = []
    for step in steps:
        engine.backward(engine(inputs(step).chunk(ranks)[rank]))
        norms.append(engine.step().grad_norm or 0.0)
        with torch.no_grad():
            if hasattr(engine.module, "logit_scale"):
                engine.module.logit_scale.clamp_(max=1.35)  # as CLIP does
    return norms


def plain(
    kind: str,
    model: type[nn.Module] = Contrastive,
    steps: int = STEPS,
    most: float | None = 1.35,
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = model()
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.05, weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        module(inputs(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
        with torch.no_grad():
            if most is not None and hasattr(module, "logit_scale"):
                module.logit_scale.clamp_(max=most)
    return norms, {name: p.detach() for name, p in module.named_parameters()}


CASES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"kind": "SGD"},
    "scalars only": {"model": Scalars},
    "small ones": {"zero": {"stage3_param_persistence_threshold": 30}},
    "all": {"zero": {"stage3_param_persistence_threshold": 31}},
    "some": {
        "zero": {
            "stage3_param_persistence_threshold": 31,
            "stage3_model_persistence_threshold": 36,
        }
    },
    "small ones in sub-groups": {
        "zero": {"stage3_param_persistence_threshold": 30, "sub_group_size": 2}
    },
    "small ones, optimizer on nvme": {
        "zero": {
            "stage3_param_persistence_threshold": 31,
            "stage3_model_persistence_threshold": 36,
            "offload_optimizer": {"device": "nvme"},
        }
    },
    "small ones, parameters on nvme": {
        "zero": {
            "stage3_param_persistence_threshold": 30,
            "offload_param": {"device": "nvme"},
        }
    },
    "all in bf16": {
        "kind": "SGD",
        "bf16": {"enabled": True},
        "zero": {"stage3_param_persistence_threshold": 31},
    },
    "sub-groups": {"zero": {"sub_group_size": 7}},
    "optimizer on nvme": {"zero": {"offload_optimizer": {"device": "nvme"}}},
    "parameters on nvme": {"zero": {"offload_param": {"device": "nvme"}}},
    "parameters on cpu": {"zero": {"offload_param": {"device": "cpu"}}},
    "bf16": {"kind": "SGD", "bf16": {"enabled": True}},
    "fp16": {"kind": "SGD", "fp16": {"enabled": True, "initial_scale_power": 8}},
}


def train_cases(directory: str) -> dict[str, Any]:
    actual = {}
    for name, case in CASES.items():
        for block in case.get("zero", {}).values():
            if isinstance(block, dict) and block["device"] == "nvme":
                block["nvme_path"] = directory
        engine = make_engine(3, **case)
        norms = train(engine)
        weights = {n: engine.full(n) for n, _ in engine.module.named_parameters()}
        engine.close()
        shapes = {n: tuple(p.shape) for n, p in engine.module.named_parameters()}
        assert shapes == {n: tuple(w.shape) for n, w in weights.items()}
        actual[name] = norms, weights
    return actual


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 4])
def test_scalars_train_like_plain_torch(ranks: int, tmp_path: Path) -> None:
    every_rank = (
        run_on_ranks(train_cases, ranks, str(tmp_path))
        if ranks > 1
        else [train_cases(str(tmp_path))]
    )
    for name, case in CASES.items():
        norms, weights = plain(case.get("kind", "AdamW"), case.get("model", Contrastive))
        wide = bool(case.keys() & {"bf16", "fp16"})
        for results in every_rank:
            own_norms, own_weights = results[name]
            assert own_norms == pytest.approx(norms, rel=0.05 if wide else 1e-5), name
            for key, weight in weights.items():
                torch.testing.assert_close(
                    own_weights[key].float(), weight, rtol=0, atol=0.02 if wide else 2e-6, msg=name
                )


SMALL = {"stage3_param_persistence_threshold": 30}
ALL = {"stage3_param_persistence_threshold": 31}


def full_optimizer() -> dict[str, list[Any]]:
    actual = {}
    for name, stage, zero in (("0", 0, {}), ("3", 3, {}), ("small", 3, SMALL), ("all", 3, ALL)):
        engine = make_engine(stage, "Lamb", zero=zero)
        train(engine)
        actual[name] = [
            w.tolist()
            for n, _ in engine.module.named_parameters()
            if (w := engine.full(n)) is not None
        ]
        engine.close()
    return actual


def test_scalars_train_with_full_parameters() -> None:
    for actual in run_on_ranks(full_optimizer, 2):
        for name in ("3", "small", "all"):
            for first, second in zip(actual["0"], actual[name], strict=True):
                torch.testing.assert_close(first, second, rtol=0, atol=1e-6, msg=name)


def save_half(directory: str, stage: int, kind: str, name: str, zero: dict[str, Any]) -> None:
    engine = make_engine(stage, kind, zero=zero)
    train(engine, range(2))
    engine.save_checkpoint(directory, tag=f"{name}{kind}")
    engine.export(f"{directory}/{name}{kind}.safetensors")
    engine.close()


def resume_half(directory: str, saved: list[str], stage: int, zero: dict[str, Any]) -> list[Any]:
    actual = []
    for tag in saved:
        engine = make_engine(stage, tag[1:], zero=zero)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0)
        engine.load_checkpoint(directory, tag=tag)
        norms = train(engine, range(2, STEPS))
        actual.append(
            (tag, norms, {n: engine.full(n) for n, _ in engine.module.named_parameters()})
        )
        engine.close()
    return actual


def save_all(directory: str) -> None:
    for name, stage, kind, zero in (
        ("3", 3, "AdamW", {}),
        ("3", 3, "SGD", {}),
        ("2", 2, "AdamW", {}),
        ("s", 3, "AdamW", SMALL),
        ("a", 3, "SGD", ALL),
    ):
        save_half(directory, stage, kind, name, zero)


def resume_all(directory: str, saved: list[str]) -> list[Any]:
    ways: list[tuple[int, dict[str, Any]]] = [(1, {}), (3, {}), (3, SMALL), (3, ALL)]
    return [item for stage, zero in ways for item in resume_half(directory, saved, stage, zero)]


def test_scalars_resume_at_other_stages_and_ranks(tmp_path: Path) -> None:
    run_on_ranks(save_all, 2, str(tmp_path))
    saved = ["3AdamW", "3SGD", "2AdamW", "sAdamW", "aSGD"]
    for ranks in (1, 4):
        results = (
            run_on_ranks(resume_all, ranks, str(tmp_path), saved)
            if ranks > 1
            else [resume_all(str(tmp_path), saved)]
        )
        for tag, norms, weights in (item for result in results for item in result):
            expected_norms, expected = plain(tag[1:])
            assert norms == pytest.approx(expected_norms[2:], rel=1e-5), tag
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-6, msg=name)


def train_module() -> list[tuple[str, dict[str, Tensor]]]:
    """Train with the module's own forward and backward; the engine does not see the outputs."""
    rank, ranks = mesh_position()
    problems = []
    for model, zero in ((Contrastive, {}), (Contrastive, SMALL), (Contrastive, ALL), (Scalars, {})):
        engine = make_engine(3, "SGD", model, zero)
        for step in range(STEPS):
            engine.module(inputs(step).chunk(ranks)[rank]).backward()
            engine.step()
        weights = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
        problems.append((f"{model.__name__}, {zero}", weights))
        engine.close()
    return problems


def test_backward_of_module_trains_replicated_parameters() -> None:
    for problems in run_on_ranks(train_module, 2):
        for case, weights in problems:
            model = Scalars if case.startswith("Scalars") else Contrastive
            _, expected = plain("SGD", model, most=None)
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-6, msg=case)


def read_directly() -> list[str]:
    """Use small parameters as scripts do, also on one rank only; return the problems."""
    rank, _ = mesh_position()
    more: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    engine = make_engine(3, zero=SMALL, **more)
    module: Any = engine.module
    wrong = []
    for step in range(4):
        engine.backward(engine(inputs(step).chunk(mesh_position()[1])[rank][:2]))
        engine.step()
    small = {name: p for name, p in module.named_parameters() if name.endswith("bias")}
    masters = {name: engine.full(name) for name in small}
    if rank == 0:
        buffer = io.BytesIO()
        state = {name: v for name, v in module.state_dict().items() if name in small}
        torch.save(state, buffer)
        buffer.seek(0)
        for name, value in torch.load(buffer, weights_only=True).items():
            if type(value) is not Tensor or not torch.equal(value, masters[name].bfloat16()):
                wrong.append(f"{name}: saved {value}, got {masters[name]}")
        for name, p in small.items():
            if p.data.float().numpy().shape != (5,) or len(p.tolist()) != 5:
                wrong.append(f"{name}: is {p}")
    # Full tensors keep their last bits, although the model computes in 16.
    values = {name: torch.full((5,), 1 / 3) for name in small}
    engine.module.load_state_dict(values, strict=False)
    for name, value in values.items():
        if not torch.equal(engine.full(name), value):
            wrong.append(f"{name}: loaded {engine.full(name)}")
    with engine.gathered(list(small), modifier_rank=1):
        if rank == 1:
            with torch.no_grad():
                module.image.bias.fill_(0.5)
    full_tensors = {name: engine.full(name) for name in small}
    if full_tensors["image.bias"].tolist() != [0.5] * 5 or not torch.equal(
        full_tensors["text.bias"], values["text.bias"]
    ):
        wrong.append(f"gathered: {full_tensors}")
    engine.close()
    return wrong


def test_small_parameters_are_read_and_written_directly() -> None:
    assert run_on_ranks(read_directly, 2) == [[], []]
