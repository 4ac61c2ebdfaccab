"""Coordinator process of a run with a hostfile: ``python -m ...nodes.follow PARENT RUN_JSON``.

It works like the coordinator of ``zerolab launch``, with a run folder instead of a terminal: the
output of the ranks goes to its logs, undelivered reports to its spool, and the outcome into a
file. SIGTERM preempts the ranks. Everything that this process started dies with it.
"""

import os
import signal
import sys
from pathlib import Path

from zerolab.client.archive import pack
from zerolab.contract.outcome import Outcome, write_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import EXIT_USER_ERROR, RunSpec, read_run_spec
from zerolab.errors import ConfigError
from zerolab.extensions.launcher_ssh.coordinator import Coordinator, LaunchPlan, MachineSlots
from zerolab.extensions.launcher_ssh.elastic_restart import ElasticRunner, RankCounts
from zerolab.extensions.launcher_ssh.environment import exported_variables, sent_variables
from zerolab.extensions.launcher_ssh.messages import RankOutput, SpoolPiece
from zerolab.extensions.launcher_ssh.output import Output
from zerolab.extensions.launcher_ssh.slot_selection import is_local_host
from zerolab.extensions.launcher_ssh.tunnel import tunnel_to
from zerolab.files import append_private
from zerolab.launcher.interpreter import find_interpreter
from zerolab.linux import die_with_parent

__all__ = ["main"]


def main() -> int:
    """Run the ranks of a run to their end."""
    parent, spec_file = sys.argv[1:]
    die_with_parent(int(parent))
    folder = RunFolder(Path(spec_file).parent)
    try:
        outcome = _run(folder, read_run_spec(folder.spec))
    except ConfigError as error:
        outcome = Outcome(EXIT_USER_ERROR, "; ".join(error.problems))
    write_outcome(folder.path, outcome)
    return 0


def _run(folder: RunFolder, run: RunSpec) -> Outcome:
    if not run.hosts:
        problem = "must be set: this agent starts ranks only on the machines of hostfiles"
        raise ConfigError("experiment", [f"resources.hostfile: {problem} (--launcher ssh)"])
    plan = _plan(folder, run)
    output = Output(folder.logs, quiet=True, file_of=_file_of)
    spool = folder.path / "spool"
    spool.mkdir(mode=0o700, exist_ok=True)

    def keep(piece: SpoolPiece) -> None:
        with append_private(spool / Path(piece.name).name) as file:
            file.write(piece.content)

    coordinator: Coordinator | ElasticRunner = Coordinator(plan, output.store_output, keep)
    if run.fewer:
        counts = (sum(len(entry.slots) for entry in run.hosts), *run.fewer)
        coordinator = ElasticRunner(plan, RankCounts(counts), output.store_output, folder.log, keep)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: coordinator.stop())
    folder.log(f"ranks on {', '.join(_machine_text(machine) for machine in plan.places)}")
    try:
        host, end = coordinator.run()
    finally:
        output.close()
    return Outcome(end.exit_code, end.reason and f"{host}: {end.reason}", end.rank, end.was_stopped)


def _plan(folder: RunFolder, run: RunSpec) -> LaunchPlan:
    """Return the launch plan; machines get the model directory and need not see this one's."""
    places = [
        MachineSlots(host.host, host.slots, local=is_local_host(host.host)) for host in run.hosts
    ]
    return LaunchPlan(
        places=places,
        run=run,
        archive=pack(folder.model),
        environment=exported_variables(os.environ) | sent_variables(folder.model),
        python=str(find_interpreter(run.python)) if run.python else "",
        ssh_config=folder.model / run.ssh_config if run.ssh_config else None,
        port=0,
        tunnel=tunnel_to(run.master),
    )


def _machine_text(machine: MachineSlots) -> str:
    return f"{machine.host} ({len(machine.slots)} slot{'s' if len(machine.slots) > 1 else ''})"


def _file_of(_host: str, piece: RankOutput) -> str:
    return "launcher.log" if piece.rank is None else f"rank_{piece.rank}.{piece.stream}"


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
