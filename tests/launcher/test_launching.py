"""Launchers run all ranks, keep their output, and leave no processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import msgspec
import pytest

from tests.launcher.helpers import alive, code_of, end_of, make_run, wait_for_exit
from tests.waiting import DEADLINE_S, until
from zerolab.contract.outcome import (
    Outcome,
    first_failure,
    read_reason,
    tail,
    write_reason,
)
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    ENV_PRELOAD,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    read_run_spec,
    write_run_spec,
)
from zerolab.files import write_json
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.local import ForkServer
from zerolab.launcher.process import (
    kill_leftovers,
    save_launcher_pid,
    start_launcher,
    stop_launcher,
)
from zerotrial.failures import reason_of

pytestmark = pytest.mark.processes

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

SAY_WHO = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
print(*(os.environ[name] for name in names), os.path.basename(os.getcwd()))
assert int(os.environ["MASTER_PORT"]) > 0 and os.path.exists(os.environ["ZEROLAB_RUN_SPEC"])
print("rank", os.environ["RANK"], "complains", file=sys.stderr)
"""

WAIT = """
import signal
print("waiting", flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENV_PRELOAD)  # as by default
        server = ForkServer(tmp_path_factory.mktemp("server") / "log")
    yield server
    server.close()


def wait_for_ranks(folder, count: int = 2) -> dict[int, int]:  # type: ignore[no-untyped-def]
    """Return the pids of the ranks as soon as all of them have printed something."""
    files = [folder.stdout(rank) for rank in range(count)]
    until(
        "all ranks have printed something",
        lambda: [file.read_text() if file.exists() else "" for file in files],
        all,
    )
    return folder.rank_pids()


def test_ranks_have_separate_output(server: ForkServer, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", SAY_WHO, slots=3)
    assert end_of(server.start(folder, ENVIRONMENT), folder) == Outcome(0)
    for rank in range(3):
        assert folder.stdout(rank).read_text() == f"{rank} {rank} 3 3 127.0.0.1 1 model\n"
        assert folder.stderr(rank).read_text() == f"rank {rank} complains\n"
    assert sorted(folder.rank_pids()) == [0, 1, 2]


REFUSE = """
import argparse, subprocess
refuse = "import argparse; argparse.ArgumentParser().error('of a tool')"
code = subprocess.run([sys.executable, "-c", refuse], stderr=subprocess.DEVNULL).returncode
print("a tool that the script starts exits with", code)
argparse.ArgumentParser(prog="train.py").error("of the script")
"""


def test_launcher_without_fork_server(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", SAY_WHO + REFUSE, slots=1)
    reason = "rank 0 exited with code 64: train.py: error: of the script"
    assert end_of(start_launcher(folder, ENVIRONMENT), folder) == Outcome(
        EXIT_USER_ERROR, reason, 0
    )
    output = "0 0 1 1 127.0.0.1 1 model\na tool that the script starts exits with 2\n"
    assert folder.stdout(0).read_text() == output


def test_boxed_error_is_one_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.stderr(0).parent.mkdir(parents=True)
    edge = "─" * 9
    box = (
        f"╭─ Error {edge}╮\n│ Invalid value for 'rate': Input should be │\n│ a number │\n╰{edge}╯\n"
    )
    folder.stderr(0).write_text(f"Usage: train.py RATE\n{box}\n")
    reason = "Error: Invalid value for 'rate': Input should be a number"
    assert first_failure(tmp_path, 0, 64) == Outcome(64, f"rank 0 exited with code 64: {reason}", 0)


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.mark.parametrize("is_class", [False, True])
def test_root_error_wins_over_lost_peer(tmp_path: Path, is_class: bool) -> None:
    """Rank 0 loses rank 1 and exits before rank 1 does; its saved reason may be first, too."""
    script = f'''\
import os, sys, time
from zerolab.contract.outcome import write_reason
if os.environ["RANK"] == "0":
    if {is_class}:
        write_reason("{tmp_path}/run", 1, {LOST!r}, 0)
    sys.exit({LOST!r})
while not os.path.exists("{tmp_path}/go"):
    time.sleep(0.01)
sys.exit("ValueError: sample 17 is broken")
'''
    folder = make_run(tmp_path / "run", script, slots=2)
    launcher = start_launcher(folder, ENVIRONMENT)
    until("rank 0 exits", lambda: LOST in tail(folder.stderr(0)))
    (tmp_path / "go").touch()
    reason = "rank 1 exited with code 1: ValueError: sample 17 is broken"
    assert end_of(launcher, folder) == Outcome(1, reason, 1)


def test_reason_of_root_replaces_lost_peer(tmp_path: Path) -> None:
    write_reason(tmp_path, 1, LOST, 0)
    write_reason(tmp_path, 1, LOST, 2)
    assert read_reason(tmp_path) == Outcome(1, f"rank 0: {LOST}", 0)
    write_reason(tmp_path, 1, "ValueError: sample 17 is broken", 1)
    write_reason(tmp_path, 1, "ValueError: sample 18 is broken", 3)
    assert read_reason(tmp_path) == Outcome(1, "rank 1: ValueError: sample 17 is broken", 1)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("deepspeed.zero", "; set `environment: {deepspeed: zerolab}`, with which this engine"),
        ("determined", "; docs/migrate/from_determined.md lists the replacement of each"),
        ("deepspeeder", f"; {sys.executable} on {socket.gethostname()} does not have it; install"),
    ],
)
def test_missing_module_has_replacement(tmp_path: Path, module: str, expected: str) -> None:
    folder = RunFolder(tmp_path)
    folder.stderr(0).parent.mkdir(parents=True)
    line = f"ModuleNotFoundError: No module named '{module}'"
    folder.stderr(0).write_text(f"Traceback (most recent call last):\n  import it\n{line}\n")
    reason = first_failure(tmp_path, 0, 1).reason or ""
    begin, _, remedy = reason.partition(line)
    assert begin == "rank 0 exited with code 1: "
    assert remedy.startswith(expected)
    error = ModuleNotFoundError(line.partition(": ")[2])
    assert reason_of(error, tmp_path) == f"{line}{remedy}"


def test_sharded_parameter_error_has_remedy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.stderr(0).parent.mkdir(parents=True)
    line = "RuntimeError: aten.mul.Tensor got mixed torch.Tensor and DTensor, need to convert all"
    folder.stderr(0).write_text(f"Traceback (most recent call last):\n  x * self.scale\n{line}\n")
    reason = first_failure(tmp_path, 0, 1).reason or ""
    assert reason.startswith(f"rank 0 exited with code 1: {line}; a method beside forward that")
    assert "register_fsdp_forward_method" in reason


def test_failed_rank_ends_run_with_message(server: ForkServer, tmp_path: Path) -> None:
    script = f"""
import os
import sys
if os.environ["RANK"] == "1":
    sys.stderr.write("[rank1]: Traceback (most recent call last):\\n")
    sys.stderr.write("[rank1]: ValueError: no such layers:\\n")
    sys.stderr.write("[rank1]: \\ta\\n[rank1]: \\n[rank1]:   b\\n")
    sys.stderr.write("[rank1]:[W1123 17:10:01.123 ProcessGroupGloo.cpp:1] Warning: destroy it\\n")
    sys.exit(1)
{WAIT}
"""
    folder = make_run(tmp_path / "run", script)
    outcome = end_of(server.start(folder, ENVIRONMENT), folder)
    assert outcome == Outcome(1, "rank 1 exited with code 1: ValueError: no such layers: a; b", 1)
    assert not any(alive(pid) for pid in folder.rank_pids().values())


def test_killed_rank_ends_run(server: ForkServer, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", WAIT)
    process = server.start(folder, ENVIRONMENT)
    ranks = wait_for_ranks(folder)
    os.kill(ranks[1], signal.SIGKILL)
    end = end_of(process, folder)
    assert (end.exit_code, end.rank) == (-9, 1)
    assert end.reason is not None
    assert end.reason.startswith("rank 1 was killed by SIGKILL: memory ran out, or a user or")
    assert "`zerolab plan` shows the memory of a rank" in end.reason
    assert "offload_optimizer" in end.reason
    assert not alive(ranks[0])


def test_killed_rank_is_named_after_all_ended(server: ForkServer, tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
from pathlib import Path
import psutil
pids = Path("pids")
if os.environ["RANK"] == "1":
    while not pids.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
others = []
while not others:  # a launcher stopped now would not start the other
    found = psutil.Process(os.getppid()).children()
    others = [one for one in found if one.pid != os.getpid()]
    time.sleep(0.01)
(other,) = others
os.kill(os.getppid(), signal.SIGSTOP)  # delay the launcher like a busy machine
pids.touch()
while other.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
print("lost the other")
sys.exit("rank 1 has ended")
"""
    folder = make_run(tmp_path / "run", script, entrypoint="script:Trial")
    process = server.start(folder, ENVIRONMENT)
    wait_for_ranks(folder, 1)
    wait_for_exit(*folder.rank_pids().values())
    os.kill(process.pid, signal.SIGCONT)
    end = end_of(process, folder)
    assert (end.exit_code, end.rank) == (-9, 1)
    assert str(end.reason).startswith("rank 1 was killed by SIGKILL")


def test_deliberate_exit_reason(server: ForkServer, tmp_path: Path) -> None:
    script = f"""
import os, sys
from zerolab.contract.outcome import write_reason
if os.environ["RANK"] == "0":
    write_reason("..", {EXIT_USER_ERROR}, "model_def.py:3: no class DigitsTrial")
    print("something else", file=sys.stderr)
    sys.exit({EXIT_USER_ERROR})
{WAIT}
"""
    folder = make_run(tmp_path / "run", script)
    outcome = end_of(server.start(folder, ENVIRONMENT), folder)
    assert outcome == Outcome(EXIT_USER_ERROR, "model_def.py:3: no class DigitsTrial")


def test_clean_exit_after_preemption_is_preempted(server: ForkServer, tmp_path: Path) -> None:
    script = f"""
import os
from zerolab.contract.outcome import write_reason
if os.environ["RANK"] == "0":
    write_reason("..", {EXIT_PREEMPTED}, "preempted at batch 7")
"""
    folder = make_run(tmp_path / "run", script)
    outcome = end_of(server.start(folder, ENVIRONMENT), folder)
    assert outcome == Outcome(EXIT_PREEMPTED, "preempted at batch 7")


def test_stopped_run_has_grace_period(server: ForkServer, tmp_path: Path) -> None:
    script = f"""
import signal, sys, os
from zerolab.contract.outcome import write_reason
def leave(*_):
    write_reason("..", {EXIT_PREEMPTED}, "checkpoint saved")
    sys.exit({EXIT_PREEMPTED})
signal.signal(signal.SIGTERM, leave)
{WAIT}
"""
    folder = make_run(tmp_path / "run", script)
    process = server.start(folder, ENVIRONMENT)
    wait_for_ranks(folder)
    stop_launcher(process, grace_s=120)
    assert end_of(process, folder) == Outcome(EXIT_PREEMPTED, "checkpoint saved")


def test_run_is_killed_after_grace_period(server: ForkServer, tmp_path: Path) -> None:
    script = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    {WAIT.strip().replace(chr(10), chr(10) + "    ")}
"""
    folder = make_run(tmp_path / "run", script)
    process = server.start(folder, ENVIRONMENT)
    ranks = wait_for_ranks(folder)
    assert stop_launcher(process, grace_s=0.2) == -signal.SIGKILL
    wait_for_exit(*ranks.values())


def test_ranks_die_with_their_launcher(server: ForkServer, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", WAIT)
    process = server.start(folder, ENVIRONMENT)
    ranks = wait_for_ranks(folder)
    os.kill(process.pid, signal.SIGKILL)
    wait_for_exit(*ranks.values())
    assert code_of(process) == -signal.SIGKILL


def test_launcher_ends_processes_of_ranks(
    tmp_path: Path,
) -> None:
    script = """
import os, subprocess, time
clean = {key: value for key, value in os.environ.items() if "ZEROLAB" not in key}
print(subprocess.Popen(["sleep", "10000"], start_new_session=True, env=clean).pid, flush=True)
time.sleep(10000)
"""
    folder = make_run(tmp_path / "run", script, slots=1)
    begun, over = Queue[LauncherProcess](), Event()

    def launch() -> None:
        begun.put(start_launcher(folder, ENVIRONMENT))
        over.wait()

    parent = Thread(target=launch)
    parent.start()
    process = begun.get()
    try:
        ranks = wait_for_ranks(folder, 1)
    finally:
        over.set()  # for the kernel the thread's end is the parent's end
        parent.join()
    child = int(folder.stdout(0).read_text())
    try:
        wait_for_exit(process.pid, *ranks.values(), child)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
    assert code_of(process) == -signal.SIGKILL


def test_processes_of_rank_are_killed(server: ForkServer, tmp_path: Path) -> None:
    script = """
import subprocess
child = subprocess.Popen(["sleep", "10000"], start_new_session=True)
print(child.pid, flush=True)
"""
    folder = make_run(tmp_path / "run", script, slots=1)
    process = server.start(folder, ENVIRONMENT)
    save_launcher_pid(folder, process)
    end_of(process, folder)
    orphan = int(folder.stdout(0).read_text())
    assert alive(orphan)
    assert kill_leftovers(folder) == 1
    assert not alive(orphan)


def test_reused_process_id_is_not_killed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", WAIT)
    with subprocess.Popen(["sleep", "10000"], start_new_session=True) as other:
        write_json(folder.launcher, {"pid": other.pid})
        assert kill_leftovers(folder) == 0
        assert other.poll() is None
        other.kill()


def test_dead_fork_server_is_replaced(
    tmp_path: Path,
) -> None:
    server = ForkServer(tmp_path / "log")
    first = make_run(tmp_path / "first", WAIT)
    process = server.start(first, ENVIRONMENT, timeout_s=DEADLINE_S)  # otherwise it is not forked
    ranks = wait_for_ranks(first)
    os.kill(server.pid, signal.SIGKILL)
    code_of(process)
    wait_for_exit(process.pid, *ranks.values())
    until("the fork server is known to be lost", lambda: server.lost)
    second = make_run(tmp_path / "second", SAY_WHO, slots=1)
    assert end_of(server.start(second, ENVIRONMENT), second) == Outcome(0)
    server.close()


def test_class_ranks_are_forked(server: ForkServer, tmp_path: Path) -> None:
    script = """
import atexit, os, sys
assert "torch" in sys.modules
import torch
assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == 1
assert os.environ["COLOUR"] == "green"
with open("/proc/self/comm") as name:  # shown by top
    assert name.read() == f"rank{os.environ['RANK']} run{os.environ['TORCHELASTIC_RUN_ID']}\\n"
print("rank", os.environ["RANK"], os.path.basename(os.getcwd()), flush=True)
if os.environ["RANK"] == "0":
    os._exit(0)
atexit.register(print, "at exit")
sys.exit(0)
"""
    variables = {"environment_variables": {"cpu": ["COLOUR=green"], "cuda": ["COLOUR=red"]}}
    folder = make_run(tmp_path / "run", script, entrypoint="script:Trial", environment=variables)
    outcome = end_of(server.start(folder, ENVIRONMENT), folder)
    assert outcome == Outcome(0), folder.stderr(1).read_text()
    assert folder.stdout(0).read_text() == "rank 0 model\n"
    assert folder.stdout(1).read_text() == "rank 1 model\nat exit\n"


@pytest.mark.parametrize("entrypoint", ["python script.py", "script:Trial"])
def test_ranks_import_engine_as_deepspeed(
    server: ForkServer, tmp_path: Path, entrypoint: str
) -> None:
    script = """
import importlib.util, sys
print(type(importlib.util.find_spec("deepspeed").loader).__module__)
sys.exit(0)
"""
    environment = {"deepspeed": "zerolab", "environment_variables": ["COLOUR=green"]}
    folder = make_run(tmp_path / "run", script, 1, entrypoint, environment=environment)
    outcome = end_of(server.start(folder, ENVIRONMENT), folder)
    assert outcome == Outcome(0), folder.stderr(0).read_text()
    assert folder.stdout(0).read_text() == "zerotrial.extensions.deepspeed_api.finder\n"


@pytest.mark.parametrize("entrypoint", ["python script.py", "script:Trial"])
def test_ranks_import_wandb_of_zerolab(server: ForkServer, tmp_path: Path, entrypoint: str) -> None:
    script = """
import sys, wandb
print(wandb.Table.__module__)
sys.exit(0)
"""
    environment = {"wandb": "zerolab"}
    folder = make_run(tmp_path / "run", script, 1, entrypoint, environment=environment)
    outcome = end_of(server.start(folder, ENVIRONMENT), folder)
    assert outcome == Outcome(0), folder.stderr(0).read_text()
    assert folder.stdout(0).read_text() == "zerolab.extensions.wandb_api.media_values\n"


def test_gpu_ranks_are_not_forked(server: ForkServer, tmp_path: Path) -> None:
    script = """
import atexit, os, sys
assert os.environ["COLOUR"] == "red"
print("rank", os.environ["RANK"], os.path.basename(os.getcwd()))
atexit.register(print, "at exit")
sys.exit(66)
"""
    variables = {"environment_variables": {"cpu": ["COLOUR=green"], "cuda": ["COLOUR=red"]}}
    folder = make_run(
        tmp_path / "run", script, slots=1, entrypoint="script:Trial", environment=variables
    )
    # No GPU is needed: the agent sets these variables for a run with a GPU.
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0"}
    outcome = end_of(server.start(folder, environment), folder)
    assert outcome == Outcome(EXIT_PREEMPTED, "preempted")
    assert folder.stdout(0).read_text() == "rank 0 model\nat exit\n"


def test_launcher_imports_torch_when_rank_connects(tmp_path: Path) -> None:
    script = """
import os, pathlib
maps = pathlib.Path(f"/proc/{os.getppid()}/maps")
before = "libtorch" in maps.read_text()
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(before, "libtorch" in maps.read_text(), int(total))
dist.destroy_process_group()
"""
    folder = make_run(tmp_path / "run", script)
    outcome = end_of(start_launcher(folder, ENVIRONMENT), folder)
    assert outcome == Outcome(0), folder.stderr(0).read_text()
    assert folder.stdout(0).read_text() == "False True 2\n"


def test_unstartable_entrypoint_is_named(server: ForkServer, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "", slots=1, entrypoint="pyhton script.py")
    outcome = end_of(server.start(folder, ENVIRONMENT), folder)
    assert outcome.exit_code == 1
    assert "'pyhton' cannot be started: No such file or directory" in (outcome.reason or "")


HEED = """
import os, pathlib, signal, time
from zerolab.contract.outcome import write_reason
from zerolab.core.preemption import SigtermFlag
if os.environ["RANK"] == "1":
    print("not ready", flush=True)
    while not pathlib.Path("go").exists():  # as if it were still being imported
        time.sleep(0.01)
asked = SigtermFlag()
print("ready", flush=True)
while not asked:
    time.sleep(0.01)
write_reason(pathlib.Path(os.environ["ZEROLAB_RUN_SPEC"]).parent, 66, "saved")
raise SystemExit(66)
"""


def test_sigterm_waits_for_handlers(server: ForkServer, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", HEED)
    process = server.start(folder, ENVIRONMENT)
    wait_for_ranks(folder)
    until("rank 0 heeds SIGTERM", folder.ready(0).exists)
    os.kill(process.pid, signal.SIGTERM)
    (folder.model / "go").touch()  # without the delay rank 1 would be killed by now
    end = end_of(process, folder)
    assert end.exit_code == EXIT_PREEMPTED, end
    assert folder.stdout(1).read_text() == "not ready\nready\n"


REPORT = """
import zerolab.core
with zerolab.core.init() as context:
    ranks = context.distributed.allgather(context.distributed.rank)
    if context.distributed.rank == 0:
        found = {"ranks": len(ranks), "trial": context.info.trial_id}
        context.train.report_validation_metrics(1, found)
"""


def test_torchrun_ranks_report_to_trial(
    tmp_path: Path,
) -> None:
    torchrun = "python -m torch.distributed.run --standalone --nproc-per-node 2 script.py"
    folder = make_run(tmp_path / "run", REPORT, 1, torchrun)
    spec = msgspec.structs.replace(read_run_spec(folder.spec), slots_per_rank=2)
    write_run_spec(spec, folder.spec)
    assert end_of(start_launcher(folder, ENVIRONMENT), folder) == Outcome(0)
    reason = map(json.loads, (folder.path / "metrics.jsonl").read_text().splitlines())
    values = [report["values"] for report in reason if report.get("group") == "validation"]
    assert values == [{"ranks": 2, "trial": 1}]
