"""Unmodified script for DeepSpeed's pipelines, compared with plain torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, EngineError

pytestmark = pytest.mark.processes

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "gradient_clipping": 0.1,
}
STEPS = 3


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2, 4), torch.randint(0, 3, (2,))) for _ in range(4)]


def script(folder: str) -> dict[str, Any]:
    from zerotrial.extensions.deepspeed_api import install

    install()
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepspeed.utils import RepeatingLoader
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    class Net(PipelineModule):  # type: ignore[misc]
        def __init__(self) -> None:
            layers = [LayerSpec(nn.Linear, 4, 5), torch.tanh, LayerSpec(nn.Linear, 5, 3)]
            super().__init__(
                layers=layers,
                topology=PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1),
                loss_fn=nn.CrossEntropyLoss(),
                partition_method="parameters",
                activation_checkpoint_interval=0,
                checkpointable_layers=None,
                dynamic_shape=False,
            )

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = Net()
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        config=CONFIG,
        training_data=[(x, y) for xs, ys in batches() for x, y in zip(xs, ys, strict=True)],
    )
    assert isinstance(engine, deepspeed.PipelineEngine)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    engine.save_checkpoint(folder, tag="start")
    data = RepeatingLoader(batches())
    losses = [engine.train_batch(data_iter=data).item() for _ in range(STEPS)]
    engine.save_checkpoint(folder, tag="end")
    norm = engine.get_global_grad_norm()
    evaluated = {
        "both": engine.eval_batch(iter(batches()), True),
        "not_told": engine.eval_batch(iter(batches()), False, True, "avg", False),
        "outputs": engine.eval_batch(
            iter(batches()), compute_loss=False, reduce_output=None, num_micro_batches=2
        ),
    }
    for wrong, instead in (
        ({"reduce_output": "sum"}, "must be \"avg\" or None, got 'sum'"),
        ({"reduce_output": None}, r"call eval_batch\(data_iter, num_micro_batches=1\)"),
        ({"compute_loss": False}, "pass reduce_output=None"),
    ):
        with pytest.raises(EngineError, match=instead):
            engine.eval_batch(iter(batches()), **wrong)
    engine.module.eval()
    loss = engine.train_batch().item()
    assert engine.module.training
    plain = engine.eval_batch(iter(batches()))
    engine.set_batch_fn(lambda item: (item["x"], item["y"]))
    named = [{"x": x, "y": y} for x, y in batches()]
    torch.testing.assert_close(engine.eval_batch(iter(named)), plain)
    for set_data in (engine.set_dataiterator, engine.set_dataloader):
        set_data(iter(named))
        assert engine.train_batch().isfinite()
    with pytest.raises(ConfigError, match="checkpointable_layers: must be None"):
        PipelineModule([torch.tanh], 1, checkpointable_layers=["Linear"])
    return {
        "losses": losses,
        "norm": float(norm),
        "own": loss,
        "evaluated": evaluated,
        "place": (engine.is_first_stage(), engine.is_last_stage()),
        "start": get_fp32_state_dict_from_zero_checkpoint(folder, "start"),
        "end": get_fp32_state_dict_from_zero_checkpoint(folder),
    }


def plainly(start: dict[str, Tensor]) -> tuple[list[float], float, dict[str, Tensor]]:
    model = nn.ModuleDict({"0": nn.Linear(4, 5), "2": nn.Linear(5, 3)})
    model.load_state_dict({name.removeprefix("layers."): value for name, value in start.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses, norm = [], 0.0
    for _ in range(STEPS):
        micro_losses = [
            nn.functional.cross_entropy(model["2"](torch.tanh(model["0"](x))), y)
            for x, y in batches()
        ]
        loss = torch.stack(micro_losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norm, {f"layers.{name}": value for name, value in model.state_dict().items()}


def test_pipeline_script_and_its_checkpoints_match_plain_torch(tmp_path: Path) -> None:
    first, last = run_on_ranks(script, 2, str(tmp_path))
    losses, norm, end = plainly(first["start"])
    for rank in (first, last):
        assert rank["losses"] == pytest.approx(losses, abs=1e-6)
        assert rank["norm"] == pytest.approx(norm, abs=1e-6)
        assert rank["own"] == pytest.approx(first["own"])
        torch.testing.assert_close(rank["end"], end, rtol=0, atol=1e-6)
    out = tmp_path / "whole"
    command = [sys.executable, tmp_path / "zero_to_fp32.py", tmp_path]
    reported = subprocess.run(
        [*command, out, "-t", "nothing"], check=False, capture_output=True, text=True
    )
    assert (reported.returncode, "nothing" in reported.stderr, reported.stdout) == (2, True, "")
    subprocess.run([*command, out, "--safe_serialization"], check=True)
    torch.testing.assert_close(load_file(out / "model.safetensors"), first["end"], rtol=0, atol=0)
    assert (first["place"], last["place"]) == ((True, False), (False, True))
    layers = [end[f"layers.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    outputs = [
        torch.tanh(x @ layers[0].T + layers[1]) @ layers[2].T + layers[3] for x, _ in batches()
    ]
    labels = [y for _, y in batches()]
    loss = nn.functional.cross_entropy(torch.cat(outputs), torch.cat(labels))
    full = {"both": (loss, outputs[-1]), "not_told": loss, "outputs": outputs[:2]}
    torch.testing.assert_close(last["evaluated"], full, rtol=0, atol=1e-5)
    (reported, logits), *remaining = first["evaluated"].values()
    assert (reported.item(), logits, remaining) == (pytest.approx(loss.item()), None, [None, None])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        actual: Tensor = self.embed(tokens) * self.scale
        return self.head(actual + self.shift.to(actual.dtype))


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_extracted_from_a_checkpoint_without_engine(stage: int, tmp_path: Path) -> None:
    from zerotrial import initialize
    from zerotrial.extensions.deepspeed_api.names import zero_to_fp32

    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    engine = initialize(model=Tied(), config=config)[0]
    engine.backward(engine(torch.tensor([1, 2])).float().square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    expected = engine.full_state_dict()
    engine.close()
    actual = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    assert actual["embed.weight"].dtype == torch.float32
    assert actual.keys() == expected.keys() == Tied().state_dict().keys()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), tmp_path / "saved")
    torch.testing.assert_close(dict(model.state_dict()), actual, rtol=0, atol=0, check_dtype=False)
    for safe, name in ((False, "pytorch_model.bin"), (True, "model.safetensors")):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path / "saved", tmp_path / "out", safe_serialization=safe
        )
        assert (tmp_path / "out" / name).stat().st_size > 0
    read = torch.load(tmp_path / "out" / "pytorch_model.bin")
    torch.testing.assert_close(read, actual, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="save_checkpoint\\(\\), which leaves them out"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            tmp_path / "saved", exclude_frozen_parameters=True
        )
