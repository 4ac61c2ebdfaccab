"""Launcher of a run: prepares the environment, runs the ranks, and writes the outcome."""

import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

from zerolab.contract.outcome import DELIBERATE_EXITS, Outcome, read_reason, write_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    ENV_AS_DEEPSPEED,
    ENV_AS_DETERMINED,
    ENV_AS_WANDB,
    ENV_HOSTS,
    ENV_RUN_SPEC,
    ENV_SCRIPT,
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    Command,
    Nodes,
    RunSpec,
    read_run_spec,
)
from zerolab.errors import ConfigError
from zerolab.registry import PARTS, Registry
from zerotrial.process.rendezvous import LOCAL, Rendezvous, choose_network_interface
from zerotrial.process.supervisor import RankSupervisor

__all__ = ["TRIAL_CLASS_MODULES", "DeferredSigterm", "import_next", "run_launcher"]

logger = logging.getLogger(__name__)

REPLACEMENTS: Registry[Callable[[], None]] = Registry("zerotrial.replacements", {})
"""Functions of extensions that replace a module which scripts import, by its name."""


TRIAL_CLASS_MODULES = (
    "zerotrial.process.harness",
    "zerotrial.loop.session",
    "zerotrial.engine.builder.build",
    "zerolab.client.http",
    "zerolab.config.validation",
    "httpcore",  # httpx imports it with its first client
    "encodings.idna",  # every resolution of a host name imports it
    "torch.utils.data",
    "safetensors.torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",  # optimizers import it with their first step
)
"""Modules that a trial class imports: 1.8 s of CPU time and 94 MB."""


def import_next(pending: list[str]) -> None:
    """Import the first module of a list and remove it from there."""
    name = pending.pop(0)
    try:
        importlib.import_module(name)
    except ImportError:  # the run that needs it reports the error to its user
        logger.exception("%s cannot be imported", name)
    if not pending:
        # A garbage collection in a forked launcher or rank writes to these objects and so copies
        # their pages: more than a third of the pages that a short trial copies.
        gc.freeze()


class StoppedEarlyError(BaseException):
    """The launcher got SIGTERM before it started a rank.

    Not a subclass of Exception, so that ``except Exception`` does not swallow it.
    """


class DeferredSigterm:
    """SIGTERM handler that defers the signal while a launcher imports modules.

    An exception raised within an import leaves the module half imported, or is swallowed there.
    """

    def __init__(self) -> None:
        self._deferring = True
        self._received = False
        signal.signal(signal.SIGTERM, self._handle)

    def release(self) -> None:
        """Stop deferring: from now on the handler raises.

        Raises:
            StoppedEarlyError: If the signal has arrived already, or when it arrives.
        """
        self._deferring = False
        if self._received:
            raise StoppedEarlyError

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._received = True
        if not self._deferring:
            raise StoppedEarlyError


def run_launcher(spec_file: Path, sigterm: DeferredSigterm) -> int:
    """Run all ranks and write the outcome to the run's directory.

    Args:
        spec_file: File of the :class:`zerolab.contract.spec.RunSpec`.
        sigterm: Handler that has deferred SIGTERM until now.

    Returns:
        Exit code of this process: 0 if the outcome is written, else one of
        :mod:`zerolab.contract.spec`, or 1.
    """
    try:
        outcome = _launch(spec_file, sigterm)
    except ConfigError as error:  # no restart can help
        logger.error("%s", error)  # noqa: TRY400 - the traceback is of no interest
        outcome = Outcome(EXIT_USER_ERROR, "; ".join(error.problems))
    except Exception as error:
        logger.exception("the ranks could not be run")
        outcome = Outcome(1, f"the launcher failed: {type(error).__name__}: {error}")
    try:
        write_outcome(spec_file.parent, outcome)
    except OSError:
        logger.exception("cannot write the outcome of the run")
        if outcome.exit_code == 0:
            return EXIT_INFRASTRUCTURE  # the trial resumes from its last checkpoint
        return outcome.exit_code if outcome.exit_code in DELIBERATE_EXITS else 1
    return 0


def _launch(spec_file: Path, sigterm: DeferredSigterm) -> Outcome:
    spec = read_run_spec(spec_file)
    RunFolder(Path(spec.run_dir)).create()
    os.environ[ENV_RUN_SPEC] = str(spec_file)
    choose_network_interface(spec.nodes)
    os.environ["PYTHONUNBUFFERED"] = "1"
    # `python` in a command is this interpreter, even if its environment is not active.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    kind = "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
    if not (isinstance(spec.entrypoint, Command) and spec.entrypoint.plain):
        os.environ[ENV_HOSTS] = ",".join(spec.host_names) or socket.gethostname()
    os.environ.update(spec.variables.get(kind, {}))
    _replace_modules()
    os.chdir(spec.model_dir)
    try:
        sigterm.release()
        with _staged(spec, spec_file) as staging_outcome:
            return staging_outcome or _run_ranks(spec)
    except StoppedEarlyError:
        message = "the run was stopped by SIGTERM before its ranks started"
        # Ranks of other machines may wait for these, so a multi-node run has failed.
        code = -signal.SIGTERM if _is_multi_node(spec) else EXIT_PREEMPTED
        return Outcome(code, message, was_stopped=True)


def _replace_modules() -> None:
    """Make imports of other libraries find the replacements that the run asks for.

    Raises:
        ConfigError: If the extension of a replacement is not installed.
    """
    variables = {
        "deepspeed": ENV_AS_DEEPSPEED,
        "determined": ENV_AS_DETERMINED,
        "wandb": ENV_AS_WANDB,
    }
    for module, variable in variables.items():
        if os.environ.get(variable, "0") in {"", "0"}:
            continue
        if problem := REPLACEMENTS.problem(module):
            raise ConfigError(f"environment.{module}", [problem])
        REPLACEMENTS[module]()


def _staged(spec: RunSpec, spec_file: Path) -> AbstractContextManager[Outcome | None]:
    """Return the context in which a run's data is staged, if it has any."""
    if spec.stage is None:
        return nullcontext()
    if problem := PARTS.problem("stage"):
        return nullcontext(Outcome(EXIT_USER_ERROR, f"data.stage: {problem}"))
    staged: AbstractContextManager[Outcome | None] = PARTS["stage"].staged(spec, spec_file)
    return staged


def _is_multi_node(spec: RunSpec) -> bool:
    """Return whether the run has launchers on other machines."""
    return spec.nodes is not None and len(spec.nodes.slots) > 1


def _run_ranks(spec: RunSpec) -> Outcome:
    command = _rank_command(spec)
    if command is None:
        # Several ranks share the memory of all modules; a single one imports them as it needs them.
        names = TRIAL_CLASS_MODULES if spec.local_slots > 1 else ("torch",)
        pending = [name for name in names if name not in sys.modules]
        while pending:
            import_next(pending)
    if _is_multi_node(spec):  # torch waits for the others in calls that no handler interrupts
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nodes = spec.nodes or Nodes((spec.slots,), 0, LOCAL, 0)
    rendezvous = Rendezvous(str(spec.run_id), nodes, staged=spec.stage is not None)
    rendezvous.join()
    outcome = RankSupervisor(spec, nodes, rendezvous).run(command)
    if outcome.exit_code == 0:
        rendezvous.leave()
    if outcome.exit_code == 0 or outcome.was_stopped:
        return read_reason(Path(spec.run_dir)) or outcome
    return outcome


def _rank_command(spec: RunSpec) -> list[str] | None:
    """Return the command line of a rank; None if the ranks are forked from the launcher."""
    parent, target = str(os.getpid()), spec.entrypoint
    if not isinstance(target, Command):
        if os.environ.get("CUDA_VISIBLE_DEVICES"):  # CUDA does not survive a fork
            return [sys.executable, "-P", "-m", "zerotrial.process.launch", "--rank", parent]
        return None
    options = [f"--hide={ENV_SCRIPT}"]
    if target.plain:
        options.append(f"--hide={ENV_RUN_SPEC}")
    if spec.slots_per_rank > 1:
        options.append(f"--slots={spec.slots_per_rank}")
    if target.cores is not None:
        options.append(f"--bind-cores={','.join(map(str, target.cores))}")
    if target.local_rank_at is not None:
        options.append(f"--local-rank-at={target.local_rank_at}")
    ranks = str(RunFolder(Path(spec.run_dir)).ranks)
    first = [sys.executable, "-P", "-m", "zerolab.launcher.rank", parent, ranks]
    expander = PARTS.find("hydra_overrides")
    words = expander.expand(target.words, spec.hparams) if expander else target.words
    return [*first, *options, "--", *words]
