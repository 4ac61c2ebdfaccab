"""Follows one run on the machines of a hostfile: ``python -m ...nodes.follow PARENT RUN_JSON``.

It is a head as that of ``zerolab launch``, with a run folder in place of a terminal: what the ranks
write goes to its logs, what they have left to report to its spool, and how the run ended stands
there at last. SIGTERM has the ranks leave. With this process dies all that it has started.
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
from zerolab.files import append_private
from zerolab.launcher.interpreter import find_interpreter
from zerolab.launcher.nodes.coordinator import Head, Place, Plan
from zerolab.launcher.nodes.elastic_restart import Elastic, RankCounts
from zerolab.launcher.nodes.environment import exported, sent_variables
from zerolab.launcher.nodes.messages import Left, Said
from zerolab.launcher.nodes.output import Output
from zerolab.launcher.nodes.slot_selection import is_here
from zerolab.launcher.nodes.tunnel import tunnel_to
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
        told = "must be set: this agent starts ranks on the machines of hostfiles alone"
        raise ConfigError("experiment", [f"resources.hostfile: {told} (--launcher ssh)"])
    plan = _plan(folder, run)
    output = Output(folder.logs, quiet=True, file_of=_file_of)
    spool = folder.path / "spool"
    spool.mkdir(mode=0o700, exist_ok=True)

    def keep(piece: Left) -> None:
        with append_private(spool / Path(piece.name).name) as file:
            file.write(piece.content)

    head: Head | Elastic = Head(plan, output.take, keep)
    if run.fewer:
        counts = (sum(len(one.slots) for one in run.hosts), *run.fewer)
        head = Elastic(plan, RankCounts(counts), output.take, folder.say, keep)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: head.stop())
    folder.say(f"ranks on {', '.join(_words(place) for place in plan.places)}")
    try:
        host, end = head.run()
    finally:
        output.close()
    return Outcome(end.exit_code, end.reason and f"{host}: {end.reason}", end.rank, end.told)


def _plan(folder: RunFolder, run: RunSpec) -> Plan:
    """What shall run where; the machines get the model directory, and need not see ours."""
    places = [Place(one.host, one.slots, local=is_here(one.host)) for one in run.hosts]
    return Plan(
        places=places,
        run=run,
        archive=pack(folder.model),
        environment=exported(os.environ) | sent_variables(folder.model),
        python=str(find_interpreter(run.python)) if run.python else "",
        ssh_config=folder.model / run.ssh_config if run.ssh_config else None,
        port=0,
        tunnel=tunnel_to(run.master),
    )


def _words(place: Place) -> str:
    return f"{place.host} ({len(place.slots)} slot{'s' if len(place.slots) > 1 else ''})"


def _file_of(_host: str, piece: Said) -> str:
    return "launcher.log" if piece.rank is None else f"rank_{piece.rank}.{piece.stream}"


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
