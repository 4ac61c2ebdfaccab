"""Examples: each one runs, and the digits train as in plain torch."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

import zerotrial
from tests.trial.helpers import fit, make_settings, make_spec, metrics
from zerolab.config import check_experiment, load_experiment
from zerolab.config.experiment.model_files import FolderFiles
from zerotrial.data import random_state
from zerotrial.process import harness

EXAMPLES = Path(__file__).parents[2] / "examples"
TRIALS = [
    "digits",
    "stdlib_gpt",
    "gan",
    "metric_reducers",
    "resume",
    "tpe_asha",
    "pbt",
    "pipeline_gpt",
]

SEED, STEPS, BATCH, LR = 7, 30, 64, 0.01


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", EXAMPLES / name / "model_def.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_smoke_experiment_of_example_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model_def", raising=False)
    config = load_experiment(EXAMPLES / name / "smoke.yaml").to_dict()
    spec = make_spec(tmp_path / name, config["hyperparameters"], config=config)
    shutil.copytree(EXAMPLES / name, spec.model_dir, dirs_exist_ok=True)
    assert harness.run(spec) == 0
    monkeypatch.delitem(sys.modules, "model_def", raising=False)
    metric = config["searcher"]["metric"]
    assert isinstance(list(metrics(tmp_path / name, "validation").values())[-1][metric], float)


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("file", ["experiment.yaml", "smoke.yaml"])
def test_example_is_a_valid_experiment(name: str, file: str) -> None:
    folder = EXAMPLES / name
    check_experiment(yaml.safe_load((folder / file).read_text()), FolderFiles(folder))
    json.loads((folder / "ds_config.json").read_text())
    assert (folder / "README.md").read_text().startswith("# ")


def test_skeleton_of_trial_api_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES.parent / "docs" / "reference" / "trial_api.md").read_text()
    code, experiment, engine = (
        re.search(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE).group(1)
        for language in ("python", "yaml", "json")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "model_def", raising=False)
    config = load_experiment(yaml.safe_load(experiment)).to_dict()
    spec = make_spec(tmp_path / "run", config["hyperparameters"], config=config)
    (Path(spec.model_dir) / "model_def.py").write_text(code)
    (Path(spec.model_dir) / "ds_config.json").write_text(engine)
    assert harness.run(spec) == 0
    monkeypatch.delitem(sys.modules, "model_def", raising=False)
    (last,) = metrics(tmp_path / "run", "validation").values()
    assert last["epochs"] == 5


def plain_losses() -> list[float]:
    """Train the digits in plain torch; the clipping norm is in fp64, as in the engine."""
    example = load_example("digits")
    random_state.seed_everything(SEED)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    loader = zerotrial.DataLoader(example.digits(training=True), batch_size=BATCH, shuffle=True)
    batches = loader.training_batches(loader.plan(1, 1), seed=SEED, rank=0, start=0)
    losses = []
    for _ in range(STEPS):
        pixels, labels = next(batches)
        loss = functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        norm = torch.stack(squares).sum().sqrt().item()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.5 / (norm + 1e-6))
        optimizer.step()
        losses.append(loss.item())
    return losses


def digits_losses(path: Path, accumulation: int) -> list[float]:
    """Train the digits example in fp32 on one rank; return the loss of each batch."""
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
    }
    spec = make_spec(path, {"deepspeed_config": config, "hidden": 32})
    settings = make_settings(STEPS, checkpoint_policy="none")
    fit(spec, load_example("digits").DigitsTrial, settings)
    return [values["loss"] for _, values in sorted(metrics(path, "training").items())]


def test_digits_losses_equal_plain_torch(tmp_path: Path) -> None:
    expected = plain_losses()
    assert expected[-1] < 0.7 * expected[0]
    for accumulation in (1, 4):
        losses = digits_losses(tmp_path / str(accumulation), accumulation)
        assert losses == pytest.approx(expected, rel=0, abs=1e-5)
