"""Command ``zerolab launch``: a script on the ranks of one or more machines, without a server."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.groups import Command, single_command
from zerolab.cli.output import print_message

if TYPE_CHECKING:
    from zerolab.extensions.launcher_ssh.coordinator import LaunchPlan
    from zerolab.extensions.launcher_ssh.elastic_restart import NodeBounds

__all__ = ["app"]

_LOCALHOST = re.compile(r"^--localhost:")
_SETTINGS = {
    "allow_interspersed_args": False,
    # --num_nodes is --num-nodes
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


class _Launch(Command):
    """Command whose options end at the script; ``--localhost:0,2`` is an option, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split ``--localhost:0,2`` before options are parsed."""
        ctx.allow_interspersed_args = False
        normalized = [_LOCALHOST.sub("--localhost=", word) for word in args]
        remaining = super().parse_args(ctx, normalized)
        script_arguments = ctx.params.get("arguments") or []
        ctx.params["arguments"] = args[
            len(args) - len(script_arguments) :
        ]  # the script's arguments, unchanged
        return remaining


app = single_command()


@app.command(cls=_Launch, rich_help_panel="Train", context_settings=_SETTINGS)
def launch(
    script: Annotated[str, typer.Argument(help="Script, or module with --module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", metavar="[ARGS]...")
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile",
            "-H",
            metavar="FILE",
            help="File with lines `HOST slots=N`. Default: the file named by DLTS_HOSTFILE, or "
            "/job/hostfile if it exists.",
        ),
    ] = None,
    include: Annotated[
        str,
        typer.Option(
            "--include",
            "-i",
            metavar="HOSTS",
            help='Use only these hosts and slots: "worker-1@worker-2:0,1".',
        ),
    ] = "",
    exclude: Annotated[
        str,
        typer.Option(
            "--exclude",
            "-e",
            metavar="HOSTS",
            help='Do not use these hosts and slots: "worker-2:0@worker-3:0,1".',
        ),
    ] = "",
    localhost: Annotated[
        str | None,
        typer.Option(metavar="SLOTS", help="Use these slots of this machine, such as 0,2."),
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num_nodes", help="Use the first N hosts.")
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num_gpus",
            "--num_accelerators",
            help="Use the first N slots of each host.",
        ),
    ] = None,
    master_addr: Annotated[
        str,
        typer.Option(
            "--master_addr", metavar="HOST", help="Address of the first host, for the rendezvous."
        ),
    ] = "",
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master_port",
            min=0,
            max=65535,
            help="Port of the first host. Default: 29500, or any free port on a single machine.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", help="The script is a module, as for python -m.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no_python", help="The script is a program.")
    ] = False,
    no_local_rank: Annotated[
        bool,
        typer.Option("--no_local_rank", help="Do not pass --local_rank=N to the script."),
    ] = False,
    config_file: Annotated[
        Path | None,
        typer.Option("--config_file", metavar="FILE", help="File written by `accelerate config`."),
    ] = None,
    ssh_config: Annotated[
        Path | None,
        typer.Option("--ssh-config", metavar="FILE", help="Configuration file of ssh (ssh -F)."),
    ] = None,
    ssh_port: Annotated[
        int | None, typer.Option("--ssh_port", help="Port of ssh (ssh -p).")
    ] = None,
    force_multi: Annotated[
        bool, typer.Option("--force_multi", help="Use ssh for this machine, too.")
    ] = False,
    no_ssh: Annotated[
        bool, typer.Option("--no_ssh", help="Start only this node of --num_nodes, without ssh.")
    ] = False,
    node_rank: Annotated[
        int | None, typer.Option("--node_rank", help="Rank of this node, with --no_ssh.")
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Python of the other machines. Default: the path of this Python."
        ),
    ] = "",
    node_timeout: Annotated[
        float,
        typer.Option(
            "--node-timeout",
            min=3,
            help="Treat a host as lost when it sends nothing for this time.",
            metavar="SECONDS",
        ),
    ] = 30.0,
    grace: Annotated[
        float,
        typer.Option(
            min=0, help="Time for ranks to save a checkpoint and exit.", metavar="SECONDS"
        ),
    ] = 30.0,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            "--elastic_training",
            help="When a host is lost, restart the script on the remaining ones.",
        ),
    ] = False,
    min_elastic_nodes: Annotated[
        int | None,
        typer.Option(
            "--min_elastic_nodes",
            help="With --elastic: minimum number of hosts. Default: 1.",
        ),
    ] = None,
    max_elastic_nodes: Annotated[
        int | None,
        typer.Option(
            "--max_elastic_nodes",
            help="With --elastic: maximum number of hosts at a time; others replace lost ones.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            "--enable_each_rank_log",
            metavar="DIR",
            help="Directory for the output of each rank. Default: logs/launch of ZEROLAB_HOME.",
        ),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Use CPU slots even if there are GPUs.")
    ] = False,
    as_deepspeed: Annotated[
        bool,
        typer.Option(
            "--as-deepspeed", help="Let `import deepspeed` import Zerolab's engine in the script."
        ),
    ] = False,
    bind_cores_to_rank: Annotated[
        bool,
        typer.Option("--bind_cores_to_rank", help="Bind each rank to separate CPU cores."),
    ] = False,
    bind_core_list: Annotated[
        str,
        typer.Option(
            "--bind_core_list", metavar="CORES", help="CPU cores to distribute, such as 0,2-5."
        ),
    ] = "",
    save_pid: Annotated[
        bool,
        typer.Option(
            "--save_pid", help="Write the process id to PID.ds in the temporary directory."
        ),
    ] = False,
    launcher: Annotated[
        str, typer.Option("--launcher", metavar="NAME", help="pdsh or ssh; both mean ssh.")
    ] = "",
    launcher_args: Annotated[
        str, typer.Option("--launcher_args", help="Not supported: use --ssh-config.")
    ] = "",
    no_ssh_check: Annotated[
        bool, typer.Option("--no_ssh_check", help="Accepted, without effect.")
    ] = False,
    autotuning: Annotated[
        str,
        typer.Option(
            "--autotuning",
            metavar="MODE",
            help="tune: find the best engine settings with `zerolab autotune`, and exit; run: "
            "train with them afterwards.",
        ),
    ] = "",
    comment: Annotated[str, typer.Option("--comment", help="Accepted, without effect.")] = "",
    account: Annotated[str, typer.Option("--account", help="Accepted, without effect.")] = "",
    venv_script: Annotated[
        str, typer.Option("--venv_script", help="Not supported: use --python.")
    ] = "",
) -> None:
    """Run a script on this machine, or on several over ssh.

    It needs no server. Put the options before the script. Exit code: the code of the rank that
    failed first, or 0; 68 if a host was lost; 75 if preempted ranks saved a checkpoint.

    Example: zerolab launch --num_gpus 2 train.py --epochs 3
    zerolab launch --hostfile hosts --include worker-1:0,1 train.py
    """
    from zerolab.contract.nodes import shell_exit_code
    from zerolab.errors import ConfigError
    from zerolab.extensions.launcher_ssh.elastic_restart import NodeBounds
    from zerolab.extensions.launcher_ssh.options import LaunchOptions, make_plan
    from zerolab.extensions.launcher_ssh.other_launchers.deepspeed_options import DeepSpeedOptions
    from zerolab.extensions.launcher_ssh.slot_selection import SlotOptions
    from zerolab.launcher.devices import find_slots

    del no_ssh_check
    min_elastic_nodes, max_elastic_nodes = _count(min_elastic_nodes), _count(max_elastic_nodes)
    local_slots = (
        "" if localhost is None else localhost or ","
    )  # an empty value is not a list of slots
    options = LaunchOptions(
        script=script,
        arguments=arguments or (),
        slot_options=SlotOptions(
            hostfile, include, exclude, _count(num_nodes), _count(num_gpus), local_slots
        ),
        address=master_addr,
        port=master_port,
        module=module,
        no_python=no_python,
        no_local_rank=no_local_rank,
        config_file=config_file,
        ssh_config=ssh_config,
        ssh_port=ssh_port,
        force_multi=force_multi,
        no_ssh=no_ssh,
        node_rank=_count(node_rank),
        python=python,
        grace_s=grace,
        silence_s=node_timeout,
        cpu=cpu,
        as_deepspeed=as_deepspeed,
        bind_cores=bind_cores_to_rank,
        core_list=bind_core_list,
        of_deepspeed=DeepSpeedOptions(
            launcher=launcher,
            launcher_args=launcher_args,
            autotuning=autotuning,
            comment=comment,
            account=account,
            venv_script=venv_script,
        ),
    )

    def own_slots(count: int | None, cpu: bool) -> list[int]:
        return [slot.id for slot in find_slots(count, cpu=cpu)]

    plan, notes = make_plan(options, own_slots)
    runs_here = any(node.local for node in plan.places)
    if runs_here and not (module or no_python) and not Path(script).is_file():
        problem = f"must be a file, got {script}, which does not exist; use --module for a module"
        raise ConfigError("script", [problem])
    for note in notes:
        print_message(note)
    if autotuning:
        from zerolab.extensions.launcher_ssh.other_launchers.autotuning import with_tuned_file

        options = with_tuned_file(options, plan)
        if autotuning == "tune":
            return
        plan, _ = make_plan(options, own_slots)
    if elastic or min_elastic_nodes is not None or max_elastic_nodes is not None:
        bounds = NodeBounds.of(plan, min_elastic_nodes, max_elastic_nodes)
    else:
        bounds = None
    if log_dir == Path("None"):  # DeepSpeed's default, which scripts pass on
        log_dir = None
    with _pid_file() if save_pid else contextlib.nullcontext():
        raise typer.Exit(shell_exit_code(_run(plan, bounds, log_dir)))


@contextlib.contextmanager
def _pid_file() -> Iterator[None]:
    """Store this process's id in a file until the run ends, as DeepSpeed's launcher does."""
    import tempfile

    file = Path(tempfile.gettempdir()) / f"{os.getpid()}.ds"
    file.unlink(missing_ok=True)  # from an earlier process with this id
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as pid:
        pid.write(str(os.getpid()))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _count(count: int | None) -> int | None:
    """Convert DeepSpeed's default -1, which scripts pass on, to None for all."""
    return None if count == -1 else count


def _run(plan: "LaunchPlan", bounds: "NodeBounds | None", log_dir: Path | None) -> int:
    """Run a plan, show and save the output of its ranks, and return the exit code."""
    import signal
    import time

    from zerolab.contract.outcome import CHECKPOINTED_EXITS
    from zerolab.extensions.launcher_ssh.coordinator import Coordinator
    from zerolab.extensions.launcher_ssh.elastic_restart import ElasticRunner
    from zerolab.extensions.launcher_ssh.output import Output
    from zerolab.paths import Home

    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    output = Output(log_dir or Home.default().launches / f"{started}-{os.getpid()}")
    coordinator: Coordinator | ElasticRunner = Coordinator(plan, output.store_output)
    if bounds is not None:
        coordinator = ElasticRunner(plan, bounds, output.store_output, output.print_message)

    def stop(_number: int, _frame: object) -> None:
        coordinator.stop()
        output.limit_wait()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    try:
        host, end = coordinator.run()
        if end.exit_code:
            output.print_message(f"{host}: {end.reason or f'exit code {end.exit_code}'}")
        output.print_message(f"the output of each rank is in {output.directory}")
    finally:
        output.close()
    if end.was_stopped and end.exit_code in CHECKPOINTED_EXITS:
        # The ranks have not started: exit codes of preempted ranks do not apply.
        return -signal.SIGTERM
    return end.exit_code
