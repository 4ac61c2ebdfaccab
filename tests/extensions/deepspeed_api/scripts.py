"""Scripts of Hugging Face's libraries, run as the entrypoint of an experiment without a server.

Each run is forked from one process that has imported the libraries: that costs seven seconds.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.engine.ranks import run_on_ranks
from tests.trial.helpers import make_spec, records
from tests.waiting import free_port
from zerolab.contract.outcome import CHECKPOINTED_EXITS, read_reason
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_RUN_SPEC, CheckpointRef, write_run_spec
from zerolab.storage.store import CheckpointStore

__all__ = ["Trial", "in_libraries"]


def in_libraries(function: Callable[[str], Any], path: Path) -> Any:
    """Call ``function(path)`` in a process with the hooked libraries."""
    (result,) = run_on_ranks(_with_libraries, 1, function, str(path))
    return result


def _with_libraries(function: Callable[[str], Any], path: str) -> Any:
    import torch.distributed as dist

    from zerotrial.extensions.deepspeed_api import install as stand_in
    from zerotrial.extensions.huggingface import install

    dist.destroy_process_group()  # the scripts start separate ones

    def begin_world() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    stand_in()
    install()
    import accelerate
    import transformers.trainer

    assert accelerate
    assert transformers.trainer
    try:
        return function(path)
    finally:
        begin_world()


class Trial:
    """Trial whose runs a test starts one after the other.

    Args:
        path: Of its runs, its checkpoints and its script.
        script: The text of the script.
        hparams: Of the trial.
        searcher: Of the experiment.
        slots: Ranks.
    """

    def __init__(
        self,
        path: Path,
        script: str,
        hparams: dict[str, Any] | None = None,
        searcher: dict[str, Any] | None = None,
        slots: int = 1,
    ) -> None:
        self.path, self.script, self.slots = path, script, slots
        self.hparams = hparams or {}
        self.searcher = searcher or {}
        self.runs = 0

    @property
    def latest(self) -> CheckpointRef | None:
        actual = CheckpointStore(self.path / "checkpoints").latest()
        return CheckpointRef(actual.uuid, actual.steps_completed) if actual else None

    @property
    def run_path(self) -> Path:
        return self.path / f"run{self.runs}"

    def reason(self) -> Any:
        return read_reason(self.run_path)

    def run(
        self, *, until: int | None = None, latest: CheckpointRef | None = None, **variables: str
    ) -> list[int]:
        """Run the script once, in a new working directory; return each rank's exit code.

        Args:
            until: Position at which a searcher pauses this run.
            latest: Checkpoint to resume from; the trial's newest if None.
            variables: Additional environment variables.
        """
        self.runs += 1
        folder = self.run_path
        spec = make_spec(
            folder,
            self.hparams,
            latest or self.latest,
            config={"entrypoint": "python script.py", "searcher": self.searcher},
            checkpoint_dir=str(self.path / "checkpoints"),
            slots=self.slots,
        )
        spec = msgspec.structs.replace(spec, fit=msgspec.structs.replace(spec.fit, until=until))
        (folder / "model" / "script.py").write_text(self.script)
        RunFolder(folder).ranks.mkdir(parents=True, exist_ok=True)
        write_run_spec(spec, folder / "run.json")
        common = {
            ENV_RUN_SPEC: str(folder / "run.json"),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(self.slots), "LOCAL_WORLD_SIZE": str(self.slots),
            "GLOO_SOCKET_IFNAME": "lo", **variables,
        }  # fmt: skip
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.slots)]
        children = [_fork({**common, **rank}, folder) for rank in ranks]
        codes: dict[int, int] = {}
        while len(codes) < self.slots:
            pid, status = os.wait()
            code = codes[pid] = os.waitstatus_to_exitcode(status)
            if code and code not in CHECKPOINTED_EXITS:  # as the launcher does when a rank fails
                for other in set(children) - codes.keys():
                    os.kill(other, signal.SIGKILL)
        return [codes[pid] for pid in children]

    def run_alone(self) -> list[int]:
        """Run the script once, outside of any experiment."""
        self.runs += 1
        folder = self.run_path
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "script.py").write_text(self.script)
        _, status = os.waitpid(_fork({"RANK": "0"}, folder), 0)
        for file in (folder / "model").glob(".zerolab/runs/*/metrics.jsonl"):
            file.rename(folder / "metrics.jsonl")
        return [os.waitstatus_to_exitcode(status)]

    def metrics(self, group: str) -> dict[int, dict[str, Any]]:
        """Metrics of the last run by batch; all that was reported of one together."""
        actual: dict[int, dict[str, Any]] = {}
        for record in self.records("metrics"):
            if record["group"] == group:
                actual.setdefault(record["steps"], {}).update(record["values"])
        return actual

    def records(self, kind: str) -> list[dict[str, Any]]:
        return records(self.run_path, kind)


def _fork(environment: dict[str, str], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / f"log{environment['RANK']}").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(environment)
        os.chdir(folder / "model")
        sys.argv = ["script.py"]
        sys.path.insert(0, str(folder / "model"))
        runpy.run_path("script.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - a process boundary: the exit code carries it on
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as Python does
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        import atexit

        from zerotrial.extensions.huggingface.run import join

        if join.cache_info().currsize:
            join().close()  # as atexit does, without the handlers of the parent process
        atexit._clear()
        os._exit(code)
