"""Runs are jobs of a real Slurm over two nodes: they meet, leave in time, and end by one rule."""

from pathlib import Path

import pytest

from tests.launcher.helpers import end_of, make_run
from tests.launcher.slurm.cluster import Cluster
from tests.waiting import until
from zerolab.contract.outcome import Outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED
from zerolab.errors import ConfigError
from zerolab.files import read_json
from zerolab.launcher.slurm.follow import outcome_of, rank_problem
from zerolab.launcher.slurm.job import job_state, job_words
from zerolab.launcher.slurm.launcher import SlurmLauncher
from zerolab.launcher.slurm.node import node_folder, sizes_of
from zerolab.launcher.slurm.settings import SlurmSettings, read_settings
from zerolab.paths import Home

SCRIPT = """
import os, pathlib, time
import zerolab.core
with zerolab.core.init() as context:
    ranks = context.distributed
    everyone = ranks.allgather(os.environ["GROUP_RANK"])
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


def test_the_settings_of_a_pool_are_read_and_all_mistakes_are_told(tmp_path: Path) -> None:
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
    told = [problem.split(":")[0].partition(".")[2] for problem in refused.value.problems]
    assert sorted(told) == ["nodes", "partitions", "sbatch_args", "slot_type"]
    file.write_text("resource_manager: {type: pbs}\n")
    with pytest.raises(ConfigError, match="must be slurm, got 'pbs'"):
        read_settings(file)


def test_a_run_takes_as_many_nodes_as_its_slots_need() -> None:
    assert sizes_of(4, 2) == [2, 2]
    assert sizes_of(3, 2) == [2, 1]
    assert sizes_of(1, 8) == [1]
    words = job_words(SlurmSettings("p", ("--mem=1G",), grace_s=90), "/r", "n", [2, 1])
    assert {"--nodes=2", "--no-requeue", "--signal=TERM@90", "--partition=p"} <= set(words)
    assert words.index("--mem=1G") < words.index("--wrap")
    assert "--cpus-per-task=2" in words
    assert "--cpus-per-task=6" in job_words(SlurmSettings(), "/r", "n", [2, 1], slots_per_rank=3)


def test_ranks_of_several_slots_must_fit_on_the_nodes_of_a_pool() -> None:
    pool = SlurmSettings(nodes=2, slots_per_node=5)
    assert rank_problem(4, 2, pool) is None
    assert rank_problem(10, 1, pool) is None
    told = "ranks of 2 slots must fit on the 2 nodes of the pool, which have 5 slots each"
    assert told in str(rank_problem(5, 2, pool))  # ten slots, of which one on each node is left
    assert "1 ranks of 6 slots" in str(rank_problem(1, 6, pool))


@pytest.mark.parametrize(
    ("state", "told", "expected"),
    [("NODE_FAIL", False, EXIT_INFRASTRUCTURE), ("CANCELLED", True, EXIT_PREEMPTED),
     ("CANCELLED", False, EXIT_INFRASTRUCTURE), ("TIMEOUT", False, EXIT_INFRASTRUCTURE)],
)  # fmt: skip
def test_a_job_that_left_no_word_is_judged_by_its_state(
    tmp_path: Path, state: str, told: bool, expected: int
) -> None:
    assert outcome_of(RunFolder(tmp_path), "7", state, 2, told=told).exit_code == expected


@pytest.mark.processes
@pytest.mark.machines
@pytest.mark.slow
def test_a_job_runs_over_two_nodes_and_leaves_with_a_checkpoint_and_a_lost_node_is_told(
    slurm: Cluster, tmp_path: Path
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
            told=lambda: "\n".join(
                f"{log}: {log.read_text(errors='replace')[-1500:]}"
                for log in [*folder.path.rglob("*.log"), *folder.logs.glob("*.err")]
            ),
        )

    done = make_run(tmp_path / "done", SCRIPT, slots=4)
    process = launcher.start(done, {})
    begun(done)
    (done.model / "go").touch()
    assert end_of(process, done) == Outcome(0)

    left = make_run(tmp_path / "left", SCRIPT, slots=4)
    process = launcher.start(left, {})
    begun(left)
    launcher.stop(process, 30)
    end = end_of(process, left)
    assert end.exit_code == EXIT_PREEMPTED, end
    assert any((left.path / "checkpoints").iterdir())

    lost = make_run(tmp_path / "lost", SCRIPT, slots=4)
    process = launcher.start(lost, {})
    begun(lost)
    slurm.net.cut("zls2")
    end = end_of(process, lost)
    slurm.net.mend("zls2")
    assert end.exit_code == EXIT_INFRASTRUCTURE, end
    assert "NODE_FAIL" in str(end.reason)
    assert launcher.sweep(lost) == 0

    job = str((read_json(lost.path / "slurm.json") or {})["job"])
    until("the job is over", lambda: job_state(job), lambda state: state != "RUNNING")
    assert node_folder(done, 1).exit.exists()
