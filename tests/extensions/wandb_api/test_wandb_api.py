"""Calls of wandb that report to a run of the Core API, to a trial, or to the disk."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import zerolab.compat.wandb as wandb
import zerolab.core
from tests.client.helpers import make_spec
from tests.core.test_context import lines
from zerolab.contract.messages import MetricsRecord, Record
from zerolab.contract.spec import ENV_RUN_SPEC, write_run_spec
from zerolab.extensions.wandb_api.run_values import ConfigChangeError
from zerolab.extensions.wandb_api.unsupported import UNSUPPORTED
from zerolab.reports.spool import SPOOL_DIR, SpoolReader

Points = dict[str, list[tuple[int, float]]]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run without a server, which wandb joins."""
    monkeypatch.delenv(ENV_RUN_SPEC, raising=False)
    with zerolab.core.init(directory=tmp_path / "run"):
        yield tmp_path / "run"
        wandb.finish()


def points_of(directory: Path) -> Points:
    """Return the points of a finished run by ``group/name``."""
    points: Points = {}
    for line in lines(directory):
        if line["kind"] == "metrics":
            for name, value in line["values"].items():
                points.setdefault(f"{line['group']}:{name}", []).append((line["steps"], value))
    return points


def test_log_counts_steps(results: Path) -> None:
    run = wandb.init(project="p")
    wandb.log({"loss": 0.5, "val/loss": np.float32(0.25)})
    wandb.log({"a": {"b": 1}}, commit=False)
    wandb.log({"loss": 0.4})
    run.log({"loss": 0.3}, step=7)
    run.log({"lr": 0.1}, step=7)
    run.log({"loss": 9.0}, step=6)  # ignored, as by wandb
    wandb.summary["best"] = 3
    assert wandb.run is run
    assert wandb.summary["loss"] == 0.4
    wandb.finish()
    assert wandb.run is None
    assert points_of(results) == {
        "training:loss": [(0, 0.5), (1, 0.4), (7, 0.3)],
        "validation:val/loss": [(0, 0.25)],
        "training:a.b": [(1, 1.0)],
        "training:lr": [(7, 0.1)],
        "summary:best": [(7, 3.0)],
    }


def test_define_metric_chooses_steps(results: Path) -> None:
    with wandb.init() as run:
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step", step_sync=True)
        run.log({"loss": 0.5, "global_step": 10})
        run.log({"loss": 0.4})  # without a step: the last one
        run.log({"loss": 0.3, "global_step": 20})
    assert points_of(results)["training:loss"] == [(10, 0.5), (10, 0.4), (20, 0.3)]


@pytest.mark.needs_extension("media")
def test_media_and_files_are_reported(results: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")
    pixels = np.zeros((4, 4, 3))
    table = wandb.Table(columns=["a", "b"], data=[[1, "x"]])
    table.add_data(2, wandb.Image(pixels, caption="cat"))
    with wandb.init() as run:
        run.log({
            "image": [wandb.Image(pixels, caption="one"), wandb.Image(pixels)],
            "table": table,
            "histogram": wandb.Histogram([1, 2, 3], num_bins=2),
            "weights": np.arange(5.0),
            "audio": wandb.Audio(np.zeros(80), sample_rate=8000),
            "html": wandb.Html("<b>bold</b>"),
            "note": "hello",
            "unknown": object(),
        })  # fmt: skip
        run.save(file)
        artifact = wandb.Artifact("model", type="model", metadata={"score": np.float64(0.5)})
        artifact.add_file(file)
        artifact.add_dir(tmp_path / "run", "copy")
        with artifact.new_file("config.json", "w") as stream:
            stream.write("{}")
        assert run.log_artifact(artifact, aliases=["best"]).wait() is artifact
    media = [line for line in lines(results) if line["kind"] == "media"]
    kinds = {(line["name"], line["type"]) for line in media}
    assert kinds >= {
        ("image", "image"), ("table", "table"), ("histogram", "histogram"),
        ("weights", "histogram"), ("audio", "audio"), ("html", "text"), ("note", "text"),
        ("weights.bin", "file"), ("model/weights.bin", "file"), ("model/config.json", "file"),
        ("model/metadata.json", "file"), ("model/copy/metrics.jsonl", "file"),
    }  # fmt: skip
    assert len([line for line in media if line["name"] == "image"]) == 2
    contents = [file.read_bytes() for file in (results / "media").iterdir()]
    assert b'{"columns":["a","b"],"rows":[[1,"x"],[2,"cat"]]}' in contents
    assert b'{"score":0.5}' in contents


def test_config_changes_need_permission(results: Path) -> None:
    wandb.init(config=argparse.Namespace(lr=0.1, layers={"depth": 2}))
    assert (wandb.config.lr, wandb.config["layers"]["depth"]) == (0.1, 2)
    with pytest.raises(ConfigChangeError, match=r"lr: must not change from 0.1 to 0.2"):
        wandb.config.lr = 0.2
    wandb.config.update({"lr": 0.2}, allow_val_change=True)
    wandb.config.setdefaults({"lr": 9, "seed": 1})
    assert dict(wandb.config) == {"lr": 0.2, "layers": {"depth": 2}, "seed": 1}
    assert wandb.config.get("missing", 5) == 5
    with pytest.raises(AttributeError, match="missing"):
        _ = wandb.config.missing


def test_trial_hparams_replace_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path, hparams={"lr": 0.5})
    write_run_spec(spec, tmp_path / "run.json")
    monkeypatch.setenv(ENV_RUN_SPEC, str(tmp_path / "run.json"))
    with wandb.init(config={"lr": 0.1, "width": 3}) as run:
        assert dict(run.config) == {"lr": 0.5, "width": 3}
        run.log({"train/loss": 0.25})
        with zerolab.core.init() as context:  # the same reporter: one file
            context.train.report_training_metrics(1, {"loss": 0.75})
    points = points_of(Path(spec.run_dir))
    assert points == {"training:train/loss": [(0, 0.25)], "training:loss": [(1, 0.75)]}


def test_disabled_run_discards_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with wandb.init(config={"lr": 0.1}) as run:
        run.log({"loss": 0.5, "image": wandb.Image(np.zeros((2, 2)))})
        assert (run.disabled, run.url, run.config.lr) == (True, "", 0.1)
    with pytest.raises(RuntimeError, match=r"call wandb\.init first"):
        wandb.log({"loss": 1})


def test_names_without_counterpart_name_their_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for name in UNSUPPORTED:
        if name.isidentifier():
            expected = f"wandb.{name} has no counterpart .*; (use|call) "
            with pytest.raises(ImportError, match=expected):
                getattr(wandb, name)
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = wandb.unknown
    with wandb.init() as run, pytest.raises(AttributeError, match=r"zerolab\.Client"):
        run.use_artifact("model:latest")
    with pytest.raises(NotImplementedError, match="zerolab import"):
        wandb.init(sync_tensorboard=True)


TRAINER = """
import importlib.metadata
import sys

import torch
import wandb
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from wandb.sdk.wandb_run import Run

assert importlib.metadata.version("wandb") == wandb.__version__
try:
    import wandb.integration.keras
except ImportError as error:
    assert "call wandb.log" in str(error), error
config = BertConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=20
)
data = [{"input_ids": torch.randint(0, 20, (4,)), "labels": i % 2} for i in range(8)]
args = TrainingArguments(
    "out", max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=4, save_steps=4,
    per_device_train_batch_size=2, report_to="wandb", run_name="tiny", use_cpu=True,
)
model = BertForSequenceClassification(config)
trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
trainer.train()
assert isinstance(wandb.run, Run)
"""


@pytest.mark.processes
def test_transformers_report_to_wandb(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    environment = {
        **os.environ, "WANDB_MODE": "offline", "WANDB_LOG_MODEL": "end", "WANDB_PROJECT": "my p",
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "zerolab.compat.wandb", "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "run `zerolab sync " in result.stderr
    (directory,) = (tmp_path / ".zerolab" / "live").iterdir()
    info: dict[str, Any] = json.loads((directory / "external.json").read_text())
    assert (info["name"], info["project"], info["create_project"]) == ("tiny", "my-p", True)
    assert info["hparams"]["vocab_size"] == 20
    payloads = SpoolReader(directory / SPOOL_DIR, ended=True).read(1 << 20)[1]
    records = [msgspec.msgpack.decode(payload, type=Record) for payload in payloads]
    metrics = [record for record in records if isinstance(record, MetricsRecord)]
    named = {(record.group, name): record.steps
             for record in metrics for name in record.values}  # fmt: skip
    assert named["training", "train/loss"] == 4
    assert named["validation", "eval/loss"] == 4
    assert named["summary", "train_loss"] == 4
    names = {record.name for record in records if not isinstance(record, MetricsRecord)}
    assert "model-tiny/model.safetensors" in names
