"""A launcher in one file: a run is one process, with any number of slots."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from zerolab.contract.messages import SlotInfo
from zerolab.contract.outcome import Outcome, write_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_RUN_SPEC, Command, read_run_spec
from zerolab.launcher.interface import LauncherProcess
from zerolab.paths import Home


class ToyProcess:
    def __init__(self, process: subprocess.Popen[bytes], folder: RunFolder) -> None:
        self.pid = process.pid
        self._process, self._folder = process, folder

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            write_outcome(self._folder.path, Outcome(code))
        return code


class ToyLauncher:
    def __init__(self, home: Home, slots: Sequence[SlotInfo]) -> None:
        self.slots = list(slots)

    def keep_ready(self) -> None:
        """Do nothing."""

    def offers(self) -> Sequence[SlotInfo]:
        return self.slots

    def start(self, folder: RunFolder, environment: Mapping[str, str]) -> LauncherProcess:
        spec = read_run_spec(folder.spec)
        assert isinstance(spec.entrypoint, Command)
        toy = {"TOY_SLOTS": str(len(self.slots)), ENV_RUN_SPEC: str(folder.spec)}
        process = subprocess.Popen(
            spec.entrypoint.words, cwd=spec.model_dir, env={**os.environ, **environment, **toy}
        )
        return ToyProcess(process, folder)

    def stop(self, process: LauncherProcess, grace_s: float) -> int:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        return -signal.SIGKILL

    def sweep(self, folder: RunFolder) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""
