"""Accelerate resumes within an epoch, launched with its own configuration file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.waiting import DEADLINE_S, free_port
from zerolab.contract.spec import ENV_AS_DEEPSPEED
from zerolab.errors import ConfigError
from zerolab.extensions.fsdp_settings import deepspeed_variables_of_fsdp

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = """
import json, sys, torch
from accelerate import Accelerator
from tests.extensions.huggingface.test_trainer import make_model
from zerolab.errors import ConfigError

folder = sys.argv[1]
accelerator = Accelerator()
file = accelerator.state.deepspeed_plugin.deepspeed_config
file["zero_optimization"]["stage3_param_persistence_threshold"] = 100  # shards matrices
reported = {}

def train(*, resume):
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(0))
    batches = torch.utils.data.DataLoader(ids, batch_size=2, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    if resume:
        accelerator.load_state(f"{folder}/state")
    losses = []
    rest = accelerator.skip_first_batches(batches, 4) if resume else batches
    for index, batch in enumerate(rest):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if not resume and index == 3:
            accelerator.save_state(f"{folder}/state")
    plain = accelerator.unwrap_model(model)
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        plain.save_pretrained(f"{folder}/{resume}", state_dict=whole)
    else:
        plain.save_pretrained(f"{folder}/{resume}", is_main_process=False, state_dict=None)
    plain.save_pretrained(f"{folder}/none")
    try:
        plain.save_pretrained(f"{folder}/shards", state_dict=plain.state_dict())
    except ConfigError as error:
        reported["refused"] = str(error)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    model.close()
    return losses

reported |= {
    "stage": file["zero_optimization"]["stage"],
    "ranks": accelerator.num_processes,
    "accumulation": accelerator.gradient_accumulation_steps,
    "all": train(resume=False),
    "rest": train(resume=True),
}
if accelerator.is_main_process:
    print("REPORTED", json.dumps(reported), flush=True)
"""


@pytest.mark.soak
def test_skip_first_batches_resumes_bitwise_after_load_state(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import ComputeEnvironment, DistributedType

    deepspeed = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    }
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType.DEEPSPEED,
        mixed_precision="no",
        use_cpu=False,
        debug=False,
        num_processes=2,
        deepspeed_config=deepspeed,
    )
    config.to_yaml_file(tmp_path / "config.yaml")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zerolab", "launch", "--as-deepspeed", "--cpu"]
    done = subprocess.run(
        [*command, "--config_file", "config.yaml", "train.py", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "ZEROLAB_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "REPORTED" in line]
    reported = json.loads(line.split("REPORTED", 1)[1])
    assert (reported["stage"], reported["ranks"], reported["accumulation"]) == (3, 2, 2)
    assert "must have whole weights, got this rank's shards" in reported["refused"]
    assert len(reported["all"]) == 8
    assert reported["rest"] == reported["all"][4:]
    names = ("False", "True", "none")
    full, *resumed = (load_file(tmp_path / name / "model.safetensors") for name in names)
    for other in resumed:
        assert full.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in full.items())


FSDP_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
main_process_port: {port}
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_offload_params: false
"""
DEEPSPEED_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
main_process_port: {port}
use_cpu: false
deepspeed_config:
  deepspeed_config_file: engine.json
  zero3_init_flag: true
"""
ENGINE_FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
FSDP_SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
samples = torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4) / 32, batch_size=2)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
model, optimizer, samples = accelerator.prepare(net, optimizer, samples)
for batch in samples:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
whole = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save((type(model).__name__, model.zero_optimization_stage(), whole), "reported.pt")
"""


@pytest.mark.parametrize("about", [pytest.param("fsdp", marks=pytest.mark.soak), "deepspeed"])
def test_config_file_chooses_the_stage_under_accelerate_launch(about: str, tmp_path: Path) -> None:
    text = FSDP_FILE if about == "fsdp" else DEEPSPEED_FILE
    (tmp_path / "file.yaml").write_text(text.format(port=free_port(), reshard="false"))
    (tmp_path / "engine.json").write_text(json.dumps(ENGINE_FILE))
    (tmp_path / "script.py").write_text(FSDP_SCRIPT)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", "file.yaml", "script.py"),
        ],
        env=os.environ | {ENV_AS_DEEPSPEED: "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    reported = "the FSDP section of accelerate's file is read as stage 2" in ended.stderr
    assert reported == (about == "fsdp")
    kind, stage, full = torch.load(tmp_path / "reported.pt")
    assert (kind, stage) == ("DeepSpeedEngine", 2 if about == "fsdp" else 3)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for batch in (torch.arange(32.0).view(8, 4) / 32).split(4):  # of both ranks
        net(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-5, atol=1e-6)


def test_fsdp_options_of_accelerate_launch_act_like_its_file() -> None:
    variables = {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}
    actual = deepspeed_variables_of_fsdp({**variables, "FSDP_OFFLOAD_PARAMS": "true"})
    assert actual["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert actual["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "cpu"
    assert actual["ACCELERATE_USE_FSDP"] == "false"
    assert deepspeed_variables_of_fsdp({**variables, "FSDP_OFFLOAD_PARAMS": "false"}) == {
        **actual,
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    }
    with pytest.raises(ConfigError, match=r"fsdp_sharding_strategy: must be FULL_SHARD.*'ALL'"):
        deepspeed_variables_of_fsdp({"FSDP_SHARDING_STRATEGY": "ALL"})
