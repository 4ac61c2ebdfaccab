"""Options and files of ``zerolab launch``, as in DeepSpeed and accelerate."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import zerotrial
from zerolab.contract.nodes import (
    EXIT_TEMPORARY,
    merge_outcomes,
    shell_exit_code,
)
from zerolab.contract.outcome import OWN_PEER_PHRASES, Outcome, failed_by_peer
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    Command,
    Nodes,
)
from zerolab.core import socket_ranks
from zerolab.errors import ConfigError, PeerFailedError
from zerolab.extensions.launcher_ssh.channel import ssh_command
from zerolab.extensions.launcher_ssh.coordinator import LaunchPlan, MachineSlots
from zerolab.extensions.launcher_ssh.elastic_restart import NodeBounds, RankCounts
from zerolab.extensions.launcher_ssh.environment import (
    exported_variables,
    parse_environment,
    sent_variables,
)
from zerolab.extensions.launcher_ssh.options import LaunchOptions, make_command, make_plan
from zerolab.extensions.launcher_ssh.slot_selection import SlotOptions, choose_machines
from zerolab.extensions.launcher_ssh.tunnel import tunnel_to
from zerotrial.process.rendezvous import Rendezvous, choose_network_interface

HOSTS = "worker-1 slots=2\nworker-2 slots=4\n"


def slots_of_this_machine(count: int | None, cpu: bool) -> Sequence[int]:
    return range(count or 4)


def plan(options: dict[str, Any], **selection: Any) -> LaunchPlan:
    launch_plan = LaunchOptions(script="train.py", slot_options=SlotOptions(**selection), **options)
    return make_plan(launch_plan, slots_of_this_machine)[0]


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text(HOSTS)
    return file


def test_machines_of_filtered_hostfile(hosts: Path) -> None:
    def chosen(**options: Any) -> dict[str, list[int]]:
        places = choose_machines(SlotOptions(hostfile=hosts, **options), [0])
        assert not any(machine.local for machine in places)
        return {machine.host: list(machine.slots) for machine in places}

    assert chosen() == {"worker-1": [0, 1], "worker-2": [0, 1, 2, 3]}
    assert chosen(include="worker-2:0,1") == {"worker-2": [0, 1]}
    assert chosen(exclude="worker-1:0@worker-2:0,1") == {"worker-1": [1], "worker-2": [2, 3]}
    assert chosen(num_nodes=1, num_gpus=1) == {"worker-1": [0]}


def test_local_host_in_hostfile(
    tmp_path: Path,
) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"{socket.gethostname()} slots=1\nother slots=1\n")
    assert [machine.local for machine in choose_machines(SlotOptions(file), [0])] == [True, False]
    assert [
        machine.local for machine in choose_machines(SlotOptions(file), [0], force_ssh=True)
    ] == [
        False,
        False,
    ]


def test_slots_without_hostfile() -> None:
    assert choose_machines(SlotOptions(), [0, 1]) == [MachineSlots("localhost", [0, 1], local=True)]
    assert choose_machines(SlotOptions(include="localhost:1"), [0, 1])[0].slots == [1]
    assert choose_machines(SlotOptions(localhost="3,0"), [0, 1, 2, 3])[0].slots == [0, 3]
    assert choose_machines(SlotOptions(num_gpus=1), [0, 1])[0].slots == [0]
    with pytest.raises(ConfigError, match="num_gpus: must be at least 1, got 0"):
        plan({}, num_gpus=0)
    with pytest.raises(ConfigError, match="num_nodes: must be the number"):
        plan({"no_ssh": True, "node_rank": 0, "address": "10.0.0.1"}, num_nodes=0)


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        (SlotOptions(localhost="0,7"), "this machine has the slots 0, 1, got 7"),
        (SlotOptions(localhost="a"), "slots must be numbers with commas between them, got 'a'"),
        (SlotOptions(localhost="0", num_gpus=2), "num_gpus: cannot be combined with --localhost"),
        (SlotOptions(num_nodes=2), "num_nodes: must be 1 without a hostfile, got 2"),
        (SlotOptions(num_gpus=0), "num_gpus: must be at least 1, got 0"),
        (SlotOptions(include="nohost"), "'nohost' is not in the hostfile"),
        (SlotOptions(include="worker-1:0"), "no hostfile was given or found"),
        (
            SlotOptions(include="localhost:0", num_gpus=2),
            "cannot be combined with include or exclude",
        ),
        (SlotOptions(localhost=","), "must be numbers with commas between them, got ''"),
        (SlotOptions(localhost="0-1"), "must be numbers with commas between them, got '0-1'"),
        (SlotOptions(hostfile=Path("/nowhere/hosts")), "hostfile: must be readable"),
    ],
)
def test_invalid_selection_is_rejected(selection: SlotOptions, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_machines(selection, [0, 1])
    assert problem in str(refused.value)


def test_hidden_slots_are_not_selected() -> None:
    def chosen(**options: Any) -> Sequence[int]:
        return choose_machines(SlotOptions(**options), [1, 3])[0].slots

    assert chosen() == chosen(include="localhost") == chosen(exclude="localhost:0") == [1, 3]
    assert chosen(exclude="localhost:1") == [3]
    for option in ({"include": "localhost:0"}, {"include": "localhost:0,1"}):
        with pytest.raises(ConfigError, match="this machine has the slots 1, 3, got localhost:0"):
            chosen(**option)
    with pytest.raises(ConfigError, match="this machine has the slots 1, 3"):
        chosen(exclude="localhost:1,3")


def test_command_matches_deepspeed() -> None:
    def command_of(**options: Any) -> Command:
        return make_command(
            LaunchOptions(
                script="train", arguments=["--x", "1"], slot_options=SlotOptions(), **options
            )
        )

    python = command_of().words[0]
    assert command_of() == Command((python, "-u", "train", "--x", "1"), local_rank_at=3, plain=True)
    assert command_of(module=True).words == (python, "-u", "-m", "train", "--x", "1")
    assert command_of(module=True).local_rank_at == 4
    assert command_of(no_python=True, no_local_rank=True) == Command(
        ("train", "--x", "1"), plain=True
    )
    with pytest.raises(ConfigError, match="module, no_python"):
        command_of(module=True, no_python=True)


def test_environment_file_syntax() -> None:
    text = "# ours\n\nA=1\n B = two words \nexport C='x=y'\nD=\n"
    assert parse_environment(text, "f") == {"A": "1", "B": "two words", "C": "x=y", "D": ""}
    text = 'export\tA=1\r\nB==x==\r\nC=it\'s\nD="two words"\nE=\'# no comment\'\nF=1 # one\nG=""\n'
    assert parse_environment(text, "f") == {
        "A": "1", "B": "=x==", "C": "it's", "D": "two words", "E": "# no comment", "F": "1 # one",
        "G": "",
    }  # fmt: skip
    text = 'A="one" and "two"\nB=\'a\' \'b\'\nC="{\\"a\\": 1}"\nD="it\'s"\n'
    assert parse_environment(text, "f") == {
        "A": '"one" and "two"', "B": "'a' 'b'", "C": '{\\"a\\": 1}', "D": "it's",
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        parse_environment("A=1\nB\n2=3\nC='open\nexport =1\nD=\0\nE-F=1\n", "f")
    assert [problem[:6] for problem in refused.value.problems] == [
        f"line {number}" for number in range(2, 8)
    ]


def test_local_environment_file_overrides_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    (tmp_path / ".deepspeed_env").write_text("A=home\nB=home\n")
    (working_dir / ".deepspeed_env").write_text("A=here\n")
    assert sent_variables(working_dir) == {"A": "here", "B": "home"}
    (tmp_path / "named").write_bytes("C=caf\u00e9\n".encode("latin-1"))
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "named"))
    with pytest.raises(ConfigError, match="it is no text in UTF-8"):
        sent_variables(working_dir)
    (tmp_path / "named").write_text("\ufeffC=named\n")
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "named"))
    assert sent_variables(working_dir) == {"C": "named"}
    variables = {"PYTHONPATH": "a", "NCCL_DEBUG": "INFO", "SECRET": "no"}
    assert exported_variables(variables) == {"PYTHONPATH": "a", "NCCL_DEBUG": "INFO"}


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_hostfile: {hosts}
  deepspeed_inclusion_filter: 'worker-2:1,3'
  zero_stage: 2
num_machines: 2
num_processes: 4
main_process_ip: 10.0.0.1
main_process_port: 4321
mixed_precision: bf16
machine_rank: 0
fsdp_config: {{fsdp_offload_params: true}}
"""


def test_accelerate_config_selects_machines(hosts: Path, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE.format(hosts=hosts))
    options = LaunchOptions(script="t.py", slot_options=SlotOptions(), config_file=file)
    launch_plan, notes = make_plan(options, slots_of_this_machine)
    assert [(machine.host, machine.slots) for machine in launch_plan.places] == [
        ("worker-2", [1, 3])
    ]
    assert (launch_plan.address, launch_plan.port) == ("10.0.0.1", 4321)
    assert launch_plan.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    unused = "deepspeed_config.zero_stage, fsdp_config.fsdp_offload_params"
    assert notes[0] == f"{file}: without effect here: {unused}"
    assert "ACCELERATE_USE_DEEPSPEED" not in launch_plan.environment
    by_line = plan({"config_file": file, "port": 1}, exclude="worker-2:0")
    assert [machine.host for machine in by_line.places] == ["worker-1", "worker-2"]
    assert by_line.port == 1


@pytest.mark.parametrize(
    ("section", "expected", "unused"),
    [
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, "
            "gradient_clipping: 1.0, zero3_init_flag: true, moe: 1}\n",
            {"ZERO_STAGE": "3", "ZERO3_INIT": "true"},
            "deepspeed_config.moe",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, "
            "fsdp_offload_params: true, fsdp_forward_prefetch: true}\n",
            {"ZERO_STAGE": "2", "OFFLOAD_OPTIMIZER_DEVICE": "cpu", "OFFLOAD_PARAM_DEVICE": "none"},
            "fsdp_config.fsdp_forward_prefetch",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, "
            "fsdp_reshard_after_forward: true, fsdp_activation_checkpointing: true}\n",
            {"ZERO_STAGE": "3", "ZERO3_SAVE_16BIT_MODEL": "true"},
            "fsdp_config.fsdp_activation_checkpointing",
        ),
    ],
)
def test_accelerate_sections_become_variables(
    section: str, expected: dict[str, str], unused: str, tmp_path: Path
) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"{section}num_processes: 2\n")
    arguments = {"script": "t.py", "slot_options": SlotOptions(), "config_file": file}
    launch_plan, notes = make_plan(
        LaunchOptions(**arguments, as_deepspeed=True), slots_of_this_machine
    )
    assert launch_plan.environment["ZEROLAB_AS_DEEPSPEED"] == "1"
    assert launch_plan.environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    result = {name: launch_plan.environment[f"ACCELERATE_DEEPSPEED_{name}"] for name in expected}
    assert result == expected
    assert notes == [f"{file}: without effect here: {unused}"]
    assert isinstance(launch_plan.run.entrypoint, Command)
    assert launch_plan.run.entrypoint.local_rank_at is None
    launch_plan, notes = make_plan(LaunchOptions(**arguments), slots_of_this_machine)
    assert "ZEROLAB_AS_DEEPSPEED" not in launch_plan.environment
    assert notes[-1].startswith("--as-deepspeed has AccelerateConfig use this engine")


def test_unknown_fsdp_strategy_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HALF}\nmachine_rank: x\n"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        plan({"config_file": file})
    assert refused.value.problems[0].startswith("machine_rank:")
    assert refused.value.problems[1] == (
        "fsdp_config.fsdp_sharding_strategy: must be FULL_SHARD, SHARD_GRAD_OP or NO_SHARD, "
        "got 'HALF'"
    )


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("gpu_ids: 0\n", [0]),
        ("gpu_ids: '0'\n", [0]),
        ("gpu_ids: 1,3\n", [1, 3]),
        ("gpu_ids: [1, 3]\nnum_processes: 2\n", [1, 3]),
        ("gpu_ids: 1,2,3\nnum_processes: 2\n", [1, 2]),
        ("gpu_ids: all\nnum_processes: 2\n", [0, 1]),
        ("use_cpu: 'false'\nnum_processes: 1\n", [0]),
    ],
)
def test_gpu_ids_of_accelerate_config(text: str, slots: list[int], tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    assert [list(machine.slots) for machine in plan({"config_file": file}).places] == [slots]


def test_options_override_accelerate_config(hosts: Path, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"

    def chosen(text: str, **selection: Any) -> tuple[dict[str, list[int]], list[str]]:
        file.write_text(text)
        options = LaunchOptions(
            script="t.py", slot_options=SlotOptions(**selection), config_file=file
        )
        launch_plan, notes = make_plan(options, slots_of_this_machine)
        return {machine.host: list(machine.slots) for machine in launch_plan.places}, notes

    both = {"worker-1": [0, 1], "worker-2": [0, 1, 2, 3]}
    assert chosen("num_machines: 1\n", hostfile=hosts) == (both, [])
    note = f"{file}: without effect here: gpu_ids, num_processes"
    text = "num_machines: 1\nnum_processes: 1\ngpu_ids: 0,1\n"
    assert chosen(text, hostfile=hosts) == (both, [note])
    assert chosen(text, hostfile=hosts, num_nodes=1)[0] == {"worker-1": [0, 1]}

    text = "gpu_ids: 1,3\n"
    assert chosen(text, num_gpus=1)[0] == {"localhost": [1]}
    assert chosen(text, num_nodes=1)[0] == {"localhost": [1, 3]}
    assert chosen(text, include="localhost:0,2")[0] == {"localhost": [0, 2]}
    assert chosen(text, exclude="localhost:1")[0] == {"localhost": [3]}
    with pytest.raises(ConfigError, match="num_gpus: must be 1 to 2, as many as gpu_ids"):
        chosen(text, num_gpus=3)
    with pytest.raises(ConfigError, match="num_nodes: must be 1 without a hostfile, got 2"):
        chosen(text, num_nodes=2)

    text = ACCELERATE.format(hosts=hosts)
    assert chosen(text, localhost="2")[0] == {"localhost": [2]}
    assert chosen(text, num_gpus=1)[0] == {"worker-1": [0], "worker-2": [0]}


def test_arguments_must_be_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONTEST", "\udcfe")
    with pytest.raises(ConfigError) as refused:
        plan({"arguments": ["\udcff"]})
    expected = "must be text of whole characters (UTF-8), got"
    assert refused.value.problems == [
        f"command[3]: {expected} '\\udcff'",
        f"variables.PYTHONTEST: {expected} '\\udcfe'",
    ]


def test_unusual_accelerate_keys(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: MEGATRON_LM\n"
        "main_training_function: train\nrdzv_backend: etcd\ndebug: true\nodd: 1\n"
        "deepspeed_config: {odd: 2}\ntpu_env: []\ndowncast_bf16: 'no'\n"
    )
    options = LaunchOptions(script="t.py", slot_options=SlotOptions(), config_file=file)
    _, (note,) = make_plan(options, slots_of_this_machine)
    assert note == (
        f"{file}: without effect here: compute_environment: AMAZON_SAGEMAKER, debug: True, "
        "deepspeed_config.odd, distributed_type: MEGATRON_LM, main_training_function: train, "
        "odd, rdzv_backend: etcd"
    )
    file.write_text(
        "gpu_ids: 0,a\nnum_processes: 8\nuse_cpu: maybe\nmain_process_port: 70000\n"
        "num_machines: 2\nmachine_rank: 2\n"
    )
    with pytest.raises(ConfigError) as refused:
        plan({"config_file": file})
    assert refused.value.problems == [
        "machine_rank: must be less than num_machines (2), got 2",
        "main_process_port: must be at most 65535, got 70000",
        "use_cpu: must be true or false, got 'maybe'",
        "gpu_ids: must be numbers with commas between them, got 'a'",
        "gpu_ids: must name at least as many as there are processes on a machine (4), got 0, a",
    ]


def test_accelerate_config_without_hostfile(
    tmp_path: Path,
) -> None:
    file = tmp_path / "accelerate.yaml"
    text = "num_machines: 2\nnum_processes: 4\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
    file.write_text(text)
    launch_plan = plan({"config_file": file})
    assert launch_plan.nodes == Nodes((2, 2), 1, "10.0.0.1", 29500)
    assert [machine.slots for machine in launch_plan.places] == [[0, 1]]
    file.write_text("num_machines: 2\nnum_processes: 3\nmachine_rank: x\n")
    with pytest.raises(ConfigError) as refused:
        plan({"config_file": file})
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "num_processes",
        "machine_rank",
    ]


def test_one_of_several_nodes_needs_rank() -> None:
    with pytest.raises(ConfigError) as refused:
        plan({"no_ssh": True}, hostfile=Path("hosts"))
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "num_nodes",
        "node_rank",
        "master_addr",
        "no_ssh",
    ]
    with pytest.raises(ConfigError, match="node_rank: must be 0 to"):
        plan({"node_rank": 2, "address": "a"}, num_nodes=2)


def test_ssh_is_non_interactive() -> None:
    arguments = ssh_command("me@host", python="/opt/python", config=Path("c"), port=2222)
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} <= set(arguments)
    assert arguments[arguments.index("-F") + 1] == "c"
    assert arguments[arguments.index("-p") + 1] == "2222"
    assert arguments[-2:] == [
        "me@host",
        "exec /opt/python -P -m zerolab.extensions.launcher_ssh.worker",
    ]


def test_network_interface_towards_first_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    result = [
        (machine.address, name)
        for name, places in psutil.net_if_addrs().items()
        for machine in places
        if machine.family == socket.AF_INET
    ]
    assert ("127.0.0.1", "lo") in result
    for address, name in result:  # packets to a local address have this address as source
        for variable in names:
            monkeypatch.setenv(variable, "")
            monkeypatch.delenv(variable)
        choose_network_interface(Nodes((1, 1), 1, address, 29500))
        assert [os.environ[variable] for variable in names] == [name, name]
    monkeypatch.setenv(names[0], "mine")
    choose_network_interface(None)
    assert os.environ[names[0]] == "mine"


def test_occupied_port_has_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PeerFailedError) as refused:
            Rendezvous("7", Nodes((1, 1), 0, "127.0.0.1", port))
    expected = str(refused.value)
    assert expected.startswith(f"port {port} cannot be listened on: ")
    assert expected.endswith("give another port (--master_port) if it is taken")


PEER = Outcome(1, "rank 3 exited with code 1: RuntimeError: Connection closed by peer", 3)
GONE = Outcome(1, "rank 1 exited with code 1: allgather: rank 0 has exited (this is rank 1)", 1)
CRASH = Outcome(1, "rank 0 exited with code 1: ValueError: no", 0)
KILLED = Outcome(-9, "rank 1 was killed by SIGKILL", 1)
SAID = Outcome(EXIT_USER_ERROR, "rank 0: no such layer", 0)
LOST = Outcome(EXIT_INFRASTRUCTURE, "the node is lost")
TOLD = Outcome(-15, "the run was stopped by SIGTERM", was_stopped=True)
SAVED = Outcome(EXIT_PREEMPTED, "checkpoint saved")
DONE = Outcome(0)


@pytest.mark.parametrize(
    ("ends", "decides"),
    [
        ([DONE, DONE], DONE),
        ([PEER, CRASH], CRASH),
        ([TOLD, PEER, KILLED], KILLED),
        ([LOST, SAID], SAID),
        ([PEER, LOST], LOST),
        ([GONE, CRASH], CRASH),
        ([CRASH, LOST], LOST),
        ([TOLD, CRASH], CRASH),
        ([TOLD, PEER], PEER),
        ([SAVED, TOLD], SAVED),
        ([SAVED, CRASH], CRASH),
        ([SAVED, SAVED], SAVED),
        ([DONE, TOLD], TOLD),
    ],
)
def test_outcomes_of_nodes_are_merged(ends: list[Outcome], decides: Outcome) -> None:
    named = {f"node-{number}": end for number, end in enumerate(ends)}
    assert merge_outcomes(named)[1] == decides
    backwards = dict(reversed(list(named.items())))
    assert merge_outcomes(backwards)[1] == decides


def test_exit_code_of_preempted_run() -> None:
    assert [shell_exit_code(code) for code in (0, 3, -9, EXIT_PREEMPTED)] == [
        0,
        3,
        137,
        EXIT_TEMPORARY,
    ]


def test_elastic_trial_uses_most_ranks() -> None:
    a, b, c = MachineSlots("a", (0, 1)), MachineSlots("b", (0, 1)), MachineSlots("c", (3,))
    counts = RankCounts((5, 4, 1))
    assert counts.choose([a, b, c]) == [a, b, c]
    assert counts.choose([a, b]) == [a, b]
    assert counts.choose([b, c]) == [MachineSlots("b", (0,))]
    assert RankCounts((5, 3)).choose([a, b]) == [a, MachineSlots("b", (0,))]
    assert RankCounts((5, 3)).choose([a]) == []
    assert RankCounts((5, 3)).shortage_message([a]) == (
        "the remaining machines have 2 slots, and the trial continues with 3 or more "
        "(resources.elastic)"
    )


@pytest.mark.parametrize(
    ("server", "forward", "seen"),
    [
        ("http://localhost:80/x", "127.0.0.1:0:localhost:80", "http://127.0.0.1:5/x"),
        ("http://127.0.0.2:81", "127.0.0.2:0:127.0.0.2:81", "http://127.0.0.2:5"),
        ("http://[::1]:81", "[::1]:0:[::1]:81", "http://[::1]:5"),
        ("https://localhost", "127.0.0.1:0:localhost:443", "https://localhost:5"),
        ("https://127.0.0.1:8443", "127.0.0.1:0:127.0.0.1:8443", "https://127.0.0.1:5"),
    ],
)
def test_tunnel_keeps_server_name(server: str, forward: str, seen: str) -> None:
    tunnel = tunnel_to(server)
    assert tunnel is not None
    assert (tunnel.forward, tunnel.address(5)) == (forward, seen)
    assert ssh_command("h", tunnel=tunnel)[-5:-3] == ["-R", forward]
    assert tunnel_to("https://10.0.0.1:8443") is None


def test_elastic_bounds(hosts: Path) -> None:
    launch_plan = plan({}, hostfile=hosts)
    assert NodeBounds.of(launch_plan, None, None) == NodeBounds(1, 2)
    assert NodeBounds.of(launch_plan, 1, 1) == NodeBounds(1, 1)
    with pytest.raises(ConfigError) as refused:
        NodeBounds.of(launch_plan, 0, 3)
    assert refused.value.problems == [
        "min_elastic_nodes: must be 1 to max_elastic_nodes, 3, got 0",
        "max_elastic_nodes: must be 1 to 2, the hosts that are chosen, got 3",
    ]
    single = plan({"no_ssh": True, "node_rank": 0, "address": "10.0.0.1"}, num_nodes=2)
    with pytest.raises(ConfigError, match="elastic: needs ssh to all machines"):
        NodeBounds.of(single, None, None)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--num_gpus", "-1", "--num_nodes", "-1", "--localhost:0", "t.py", "--localhost:3", "a:b"],
         0, "['--local_rank=0', '--localhost:3', 'a:b']"),
        (["--localhost", "", "t.py"], 2, "must be numbers with commas between them, got ''"),
        (["--hostfile", "hosts", "--num_nodes", "9", "t.py"], 2, "got 9"),
        (["train", "--epochs", "3"], 2, "must be a file, got train, which does not exist"),
        (["--hostfile", "hosts", "--include", "none", "--ssh-config", "ssh", "elsewhere.py"],
         EXIT_INFRASTRUCTURE, "none: the node is lost: its process could not be started"),
        (["--hostfile", "hosts", "--exclude", f"none@last@{socket.gethostname()}:1",
          "--master_addr", "127.0.0.2", "--module", "--no_local_rank", "t", "leave"],
         EXIT_TEMPORARY, "['leave'] t 127.0.0.2 0 of 1"),
    ],
)  # fmt: skip
def test_options_end_at_script(
    arguments: list[str], code: int, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=2\nnone slots=1\nlast slots=1")
    (tmp_path / "t.py").write_text(
        "import os, sys\n"
        "seen = [os.environ[name] for name in ('MASTER_ADDR', 'RANK', 'WORLD_SIZE')]\n"
        "print(sys.argv[1:], __spec__ and __spec__.name, *seen[:2], 'of', seen[2])\n"
        f"sys.exit({EXIT_PREEMPTED} if 'leave' in sys.argv else 0)\n"
    )
    (tmp_path / "ssh").write_text("Host none\n  ProxyCommand false\n")
    command = [str(Path(sys.executable).with_name("zerolab")), "launch", "--cpu", "--log-dir", "k"]
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert expected in (done.stderr if code in {2, EXIT_INFRASTRUCTURE} else done.stdout)


@pytest.mark.parametrize("phrase", OWN_PEER_PHRASES)
def test_phrases_of_lost_peers_occur_in_errors(phrase: str) -> None:
    """A reworded error would otherwise blame the rank that lost another one."""
    sources = [Path(socket_ranks.__file__), *Path(zerotrial.__file__).parent.rglob("*.py")]
    assert any(phrase in source.read_text() for source in sources)
    assert failed_by_peer(Outcome(1, f"rank 1 {phrase} 5 s"))
