"""Runs as jobs of a real Slurm on two nodes: rendezvous, preemption and outcome."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.extensions.launcher_slurm.cluster import Cluster
from tests.launcher.helpers import end_of, make_run
from tests.waiting import DEADLINE_S, until
from zerolab.contract.messages import SlotInfo
from zerolab.contract.nodes import node_capacity_problem
from zerolab.contract.outcome import Outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_HOME, EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from zerolab.errors import ConfigError
from zerolab.extensions.launcher_slurm.allocations import job_of
from zerolab.extensions.launcher_slurm.follow import follow, outcome_of
from zerolab.extensions.launcher_slurm.job import job_state, sbatch_command, write_job_script
from zerolab.extensions.launcher_slurm.launcher import SlurmLauncher
from zerolab.extensions.launcher_slurm.partition import (
    count_ready,
    partition_problems,
    wait_for_partition,
)
from zerolab.extensions.launcher_slurm.settings import SlurmSettings, read_settings
from zerolab.extensions.launcher_slurm.worker import node_folder, sizes_of
from zerolab.launcher.devices import find_slots
from zerolab.paths import Home

EXAMPLE = Path(__file__).parents[3] / "examples" / "slurm"
SCRIPT = """
import os, pathlib, time
import zerolab.core
with zerolab.core.init() as context:
    ranks = context.distributed
    everyone = ranks.allgather(os.environ["GROUP_RANK"])
    print("hosts", os.environ["ALL_WORKERS"], flush=True)
    print("nodes", *everyone, flush=True)
    preempted = go = False
    while not (preempted or go):
        time.sleep(0.05)
        preempted = context.preempt.should_preempt()
        go = ranks.broadcast(pathlib.Path("go").exists())
    if ranks.is_chief:
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "weights").write_text("1")
if preempted:
    raise SystemExit(66)
"""
ENDLESS = """
import os, signal, sys
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[2:], flush=True)
while True:
    signal.pause()
"""


def test_settings_report_all_problems(tmp_path: Path) -> None:
    file = tmp_path / "slurm.yaml"
    file.write_text(
        "resource_manager:\n  type: slurm\n  partition: gpu\n  sbatch_args: [--gpus-per-node=4]\n"
        "  nodes: 2\n  slots_per_node: 4\n  slot_type: cuda\n"
    )
    settings = read_settings(file)
    assert settings == SlurmSettings("gpu", ("--gpus-per-node=4",), 2, 4, "cuda")
    assert len(settings.slots) == 8
    file.write_text("type: slurm\nnodes: 0\nsbatch_args: x\npartitions: a\nslot_type: tpu\n")
    with pytest.raises(ConfigError) as refused:
        read_settings(file)
    reported = [problem.split(":")[0].partition(".")[2] for problem in refused.value.problems]
    assert sorted(reported) == ["nodes", "partitions", "sbatch_args", "slot_type"]
    file.write_text("resource_manager: {type: pbs}\n")
    with pytest.raises(ConfigError, match="must be slurm, got 'pbs'"):
        read_settings(file)


def test_job_has_needed_nodes() -> None:
    assert sizes_of(4, 2) == [2, 2]
    assert sizes_of(3, 2) == [2, 1]
    assert sizes_of(1, 8) == [1]
    command = sbatch_command(SlurmSettings("p", ("--mem=1G",), grace_s=90), "/r", "n", [2, 1])
    assert {"--nodes=2", "--no-requeue", "--signal=TERM@90", "--partition=p"} <= set(command)
    assert command[-1] == "--mem=1G"
    assert "--output=/dev/null" in command  # a path would be read as a pattern
    assert "--cpus-per-task=2" in command
    assert "--cpus-per-task=6" in sbatch_command(
        SlurmSettings(), "/r", "n", [2, 1], slots_per_rank=3
    )


@pytest.mark.parametrize(
    "name", ["a b", "$(touch hacked)", "`touch hacked`", "'; touch hacked; '", '"$HOME"\\', "%j\n#"]
)
def test_job_script_quotes_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run_dir = tmp_path / name
    run_dir.mkdir()
    script = write_job_script(run_dir, f"/opt/{name}/python")
    assert script.stat().st_mode & 0o777 == 0o700
    (run_dir / "logs").mkdir()
    subprocess.run(["/bin/sh", script], check=True)
    log = RunFolder(run_dir).launcher_log
    assert log.read_text().split("\0")[:-1] == [
        "--kill-on-bad-exit=0", f"/opt/{name}/python", "-P", "-m",
        "zerolab.extensions.launcher_slurm.worker", str(run_dir),
    ]  # fmt: skip
    assert not list(tmp_path.rglob("hacked"))


def test_ranks_must_fit_on_nodes() -> None:
    pool = SlurmSettings(nodes=2, slots_per_node=5)
    assert pool.nodes_slots == [5, 5]
    assert [slot.node for slot in pool.slots] == [0] * 5 + [1] * 5
    assert node_capacity_problem(4, 2, [5, 5]) is None
    assert node_capacity_problem(10, 1, [5, 5]) is None
    assert node_capacity_problem(5, 2, [5, 5]) == (  # ten slots, one on each node is unused
        "resources.slots_per_rank: 5 rank(s) of 2 slot(s) must fit on the 2 node(s) of the Slurm "
        "pool, with 5 slot(s) each"
    )
    assert str(node_capacity_problem(1, 6, [5, 4])).endswith("with 4 or 5 slot(s) each")
    assert str(node_capacity_problem(3, 1, [1, 1])).startswith(
        "resources.slots_per_trial: 3 rank(s) of 1"
    )


@pytest.mark.parametrize(
    ("settings", "lines", "keys"),
    [
        (SlurmSettings("p", nodes=2, slots_per_node=8), ["p 8 (null)", "p 4 (null)"], []),
        (SlurmSettings("p", nodes=3, slots_per_node=9), ["p 8 (null)", "p 4 (null)"],
         ["nodes: must be at most 2", "slots_per_node: must be at most 8, the CPUs"]),
        (SlurmSettings(nodes=2), ["a* 8 (null)", "b 4 (null)"],
         ["nodes: must be at most 1, the nodes of partition a (sinfo), got 2"]),
        (SlurmSettings("p", slots_per_node=4, slot_type="cuda"), ["p 8 gpu:a100:4(S:0-1)"], []),
        (SlurmSettings("p", slots_per_node=5, slot_type="cuda"), ["p 8 shard:9,gpu:2,gpu:b:2"],
         ["slots_per_node: must be at most 4, the GPUs"]),
        (SlurmSettings("p", slots_per_node=4, slot_type="cuda"), ["p 8 (null)"], []),
        (SlurmSettings("p"), [], ["partition: must be one that has nodes, got p"]),
    ],
)  # fmt: skip
def test_settings_must_match_partition(
    settings: SlurmSettings, lines: list[str], keys: list[str]
) -> None:
    problems = partition_problems(settings, lines)
    assert len(problems) == len(keys), problems
    for problem, key in zip(problems, keys, strict=True):
        assert problem.startswith(f"resource_manager.{key}")


def test_slots_of_lost_nodes_are_down() -> None:
    states = ["idle", "MIXED", "allocated+", "idle~", "idle*", "down*", "drained", "draining",
              "maint", "fail", "reboot^"]  # fmt: skip
    lines = [f"p {state} n{number}" for number, state in enumerate(states)]
    assert count_ready(SlurmSettings("p"), lines) == 4
    # Nodes that our runs fill: only the draining one still counts.
    assert count_ready(SlurmSettings("p"), lines, [f"n{number}" for number in range(11)]) == 5
    assert count_ready(SlurmSettings(), ["a* idle n1", "a* down* n2", "b idle n1"]) == 1
    pool = SlurmSettings(nodes=2, slots_per_node=2)
    assert [slot.down for slot in pool.slots_on(1)] == [False, False, True, True]
    assert pool.slots_on(None) == pool.slots_on(9) == pool.slots


def test_default_slots_are_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "scontrol", "scancel", "sinfo"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\necho 'p* idle n1'\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    offered = SlurmLauncher(Home(tmp_path / "home"), find_slots(8, cpu=True)).offers()
    assert offered == [SlotInfo(number, "cpu", node=0) for number in range(8)]
    gpus = [SlotInfo(number, f"cuda:{number} H100") for number in range(2)]
    offered = SlurmLauncher(Home(tmp_path / "home"), gpus).offers()
    assert [slot.device for slot in offered] == ["cuda:0 Slurm"] * 2


def test_agent_waits_for_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = tmp_path / "sinfo"
    command.write_text(
        "#!/bin/sh\n"
        f"if [ -e {tmp_path}/asked ]; then echo 'p 4 (null)'; exit 0; fi\n"
        f"touch {tmp_path}/asked; echo 'Unable to contact slurm controller' >&2; exit 1\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("zerolab.extensions.launcher_slurm.partition._WAIT_S", 0.01)
    wait_for_partition(SlurmSettings("p", slots_per_node=4))
    (reported,) = [
        record.getMessage() for record in caplog.records if "Slurm" in record.getMessage()
    ]
    assert reported.startswith("Slurm does not answer (sinfo: Unable to contact slurm controller)")
    with pytest.raises(ConfigError, match="slots_per_node: must be at most 4"):
        wait_for_partition(SlurmSettings("p", slots_per_node=5))
    wait_for_partition(SlurmSettings("p", ("--partition=q",), slots_per_node=5))


@pytest.mark.parametrize(
    ("state", "reported", "expected"),
    [("NODE_FAIL", False, EXIT_INFRASTRUCTURE), ("CANCELLED", True, EXIT_PREEMPTED),
     ("CANCELLED", False, EXIT_INFRASTRUCTURE), ("TIMEOUT", False, EXIT_INFRASTRUCTURE)],
)  # fmt: skip
def test_job_without_outcome_uses_state(
    tmp_path: Path, state: str, reported: bool, expected: int
) -> None:
    assert outcome_of(RunFolder(tmp_path), "7", state, 2, is_stopped=reported).exit_code == expected


@pytest.mark.processes
@pytest.mark.machines
@pytest.mark.slow
def test_job_on_two_nodes_and_lost_node(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SlurmSettings(nodes=2, slots_per_node=2, grace_s=30)
    launcher = SlurmLauncher(Home(tmp_path / "home"), settings.slots, settings)

    def begun(folder: RunFolder) -> None:
        until(
            "all ranks have met",
            lambda: [
                folder.stdout(rank).exists() and "nodes 0 0 1 1" in folder.stdout(rank).read_text()
                for rank in range(4)
            ],
            all,
            details=lambda: "\n".join(
                f"{log}: {log.read_text(errors='replace')[-1500:]}"
                for log in [*folder.path.rglob("*.log"), *folder.logs.glob("*.err")]
            ),
        )

    # A path that a shell, or Slurm's file name patterns, would split.
    done = make_run(tmp_path / "done of 'me' $(touch hacked) %j", SCRIPT, slots=4)
    process = launcher.start(done, {})
    begun(done)
    for rank in range(4):
        assert "hosts n1,n2\n" in done.stdout(rank).read_text()
    (done.model / "go").touch()
    assert end_of(process, done) == Outcome(0)
    assert not list(tmp_path.rglob("hacked"))
    assert done.launcher_log.exists()

    stopped_run = make_run(tmp_path / "left", SCRIPT, slots=4)
    process = launcher.start(stopped_run, {})
    begun(stopped_run)
    # A draining node counts while our run fills it; it accepts no other job.
    drain = ["scontrol", "update", "nodename=n2", "state=drain", "reason=maintenance"]
    subprocess.run(drain, check=True)
    until("n2 is draining", slurm.states, lambda reported: "n2 draining" in reported)
    assert not any(slot.down for slot in launcher.offers())
    monkeypatch.setattr("zerolab.extensions.launcher_slurm.follow._LACKING_S", 0.1)
    # Nodes of `all` accept several jobs at once, nodes of `low` one exclusive job.
    limited = replace(settings, nodes=3, partition="low", sbatch_args=("--exclusive",))
    signals: list[int] = []
    limit = threading.Timer(DEADLINE_S, signals.append, [15])
    limit.start()
    end = follow(make_run(tmp_path / "waits", SCRIPT), limited, signals)
    limit.cancel()
    assert end.exit_code == EXIT_PREEMPTED
    assert "and Slurm has 2, of whose 4 slot(s) other runs hold 4" in str(end.reason)
    launcher.stop(process, 30)
    end = end_of(process, stopped_run)
    assert end.exit_code == EXIT_PREEMPTED, end
    assert any((stopped_run.path / "checkpoints").iterdir())
    until("n2 is empty", slurm.states, lambda reported: "n2 drained" in reported)
    assert [slot.down for slot in launcher.offers()] == [False, False, True, True]
    subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], check=True)

    lost = make_run(tmp_path / "lost", SCRIPT, slots=4)
    # The ranks of the remaining node wait for the others until they are killed.
    settings = SlurmSettings(nodes=2, slots_per_node=2, grace_s=3)
    launcher = SlurmLauncher(Home(tmp_path / "home"), settings.slots, settings)
    process = launcher.start(lost, {})
    begun(lost)
    slurm.net.cut("zls2")
    end = end_of(process, lost)
    slurm.net.mend("zls2")
    # Slurm would check it again within a minute.
    subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], check=False)
    assert end.exit_code == EXIT_INFRASTRUCTURE, end
    assert "NODE_FAIL" in str(end.reason)
    assert launcher.sweep(lost) == 0

    job = job_of(lost)
    assert job is not None
    until("the job is over", lambda: job_state(job), lambda state: state != "RUNNING")
    assert node_folder(done, 1).exit.exists()


@pytest.mark.processes
@pytest.mark.machines
@pytest.mark.slow
def test_example_job_is_requeued(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(read_settings(EXAMPLE / "slurm.yaml").slots) == 4
    shutil.copytree(EXAMPLE, tmp_path / "slurm")
    (tmp_path / "hostfile").mkdir()
    (tmp_path / "hostfile" / "train.py").write_text(ENDLESS)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv(ENV_HOME, str(tmp_path / "home"))

    def execute(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path / "slurm", check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    job = execute("sbatch", "--parsable", "job.sh")
    out = tmp_path / "slurm" / f"slurm-{job}.out"
    reported = lambda: out.read_text() if out.exists() else slurm.states()  # noqa: E731
    until("all ranks wait", reported, lambda text: text.count(" of 4 --steps 1000") == 4)
    # Slurm does this before a time limit.
    subprocess.run(["scancel", "--signal=TERM", job], check=False)
    until(
        "it is queued again",
        lambda: execute("scontrol", "--oneliner", "show", "job", job),
        lambda text: " Restarts=0 " not in text,
        details=reported,
    )
    execute("scancel", job)
