"""The coordinator of a run, with this machine only."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extensions.launcher_ssh.test_options import plan
from zerolab.contract.outcome import Outcome
from zerolab.extensions.launcher_ssh import coordinator as module
from zerolab.extensions.launcher_ssh.channel import NodeMessage
from zerolab.extensions.launcher_ssh.coordinator import Coordinator
from zerolab.extensions.launcher_ssh.messages import RankOutput

pytestmark = pytest.mark.processes

SLEPT_S = 1e6


def test_suspended_coordinator_extends_start_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('here')\n")
    slept = 0.0
    lines: list[str] = []

    def show(_host: str, output: RankOutput) -> None:
        nonlocal slept
        lines.extend(output.content.decode().splitlines())
        if lines[-1] == "early":
            slept = SLEPT_S

    clock: Any = SimpleNamespace(monotonic=lambda: time.monotonic() + slept)
    monkeypatch.setattr(module, "time", clock)
    launch_plan = replace(plan({"cpu": True}, num_gpus=1), start_s=300.0, silence_s=2 * SLEPT_S)
    head = Coordinator(launch_plan, show)
    head._messages.put(
        NodeMessage("localhost", RankOutput(b"early\n"))
    )  # before the machine connects
    assert head.run() == ("localhost", Outcome(0))
    assert head.lost == []
    assert [line for line in lines if line in {"early", "here"}] == ["early", "here"]
