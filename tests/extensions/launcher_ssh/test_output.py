"""Output and termination of ``zerolab launch`` on one machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.extensions.launcher_ssh.test_options import plan
from tests.launcher.helpers import catches_sigterm
from tests.waiting import until
from zerolab.extensions.launcher_ssh.channel import local_command
from zerolab.extensions.launcher_ssh.messages import Ended, Job, Stop, decode_from_worker, encode
from zerolab.extensions.launcher_ssh.printing import Printer, View

pytestmark = pytest.mark.processes

UNTIL_GO = """
import pathlib, time
here, ticks = pathlib.Path(), 0
def wait():
    global ticks
    while not (here / "go").exists():
        time.sleep(0.1)
        ticks += 1
        (here / "ticks").write_text(str(ticks))
"""
SILENCE_S = 3.0
"""The shortest silence after which a worker considers the coordinator lost."""


class Launched:
    """A ``zerolab launch`` of one rank in a directory."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        prefix: Sequence[str] = (),
        silence_s: float = SILENCE_S,
        **environment: str,
    ) -> None:
        self.folder = folder
        (folder / "train.py").write_text(script)
        program = str(Path(sys.executable).with_name("zerolab"))
        command = [*prefix, program, "launch", "--cpu", "--num_gpus", "1", "--log-dir", "kept"]
        command += ["--node-timeout", str(silence_s), "--no_local_rank", "train.py"]
        with (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    def written(self) -> bytes:
        """Return the file with the rank's standard output."""
        file = self.folder / "kept" / "localhost_rank_0.out"
        return file.read_bytes() if file.exists() else b""

    def ticks(self) -> int:
        """Return the tenths of a second that the rank has waited."""
        file = self.folder / "ticks"
        return int((file.read_text() if file.exists() else "") or "0")

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for an event while the command runs."""
        until(
            what,
            lambda: condition() or self.process.poll() is not None,
            details=(self.folder / "err").read_text,
        )
        assert self.process.poll() is None, (self.folder / "err").read_text()

    def end(self) -> tuple[int, str]:
        """Read all of its output, and return exit code and output."""
        out, _ = self.process.communicate()
        return self.process.returncode, out.decode()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started = []

    def start(script: str, **options: object) -> Launched:
        started.append(Launched(tmp_path, script, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
        assert launched.process.stdout is not None
        launched.process.stdout.close()


def test_blocked_reader_misses_nothing(
    launch: Callable[..., Launched],
) -> None:
    script = f"{UNTIL_GO}\nfor i in range(5000): print('x' * 200, i)\nwait()\nprint('end')\n"
    launched = launch(script)
    launched.until("all is kept", lambda: b" 4999\n" in launched.written())
    launched.until("it waits long", lambda: launched.ticks() > 10 * 2 * SILENCE_S)
    (launched.folder / "go").touch()
    code, out = launched.end()
    assert code == 0, (launched.folder / "err").read_text()
    lines = [f"{'x' * 200} {i}" for i in range(5000)] + ["end"]
    assert out.splitlines() == [f"[localhost:0] {line}" for line in lines]
    assert launched.written().decode().splitlines() == lines


def test_ctrl_c_works_with_blocked_reader(launch: Callable[..., Launched]) -> None:
    launched = launch(f"{UNTIL_GO}\nprint(('x' * 200 + chr(10)) * 5000)\nwait()\n")
    launched.until("it waits", launched.ticks)
    launched.process.send_signal(signal.SIGINT)
    until("it has ended", lambda: launched.process.poll() is not None)
    assert launched.process.returncode == 128 + signal.SIGTERM
    assert "the run was stopped by SIGTERM" in (launched.folder / "err").read_text()


def test_progress_bar_is_shown_before_its_end(
    launch: Callable[..., Launched],
) -> None:
    bar = "for i in range(100): print(f'\\r{i}%', end='', flush=True)"
    other = "import sys; sys.stdout.buffer.write(b'\\n\\xff\\0\\xe2\\x9c\\x93\\n')"
    launched = launch(f"{UNTIL_GO}\n{bar}\nwait()\n{other}\n", PYTHONIOENCODING="ascii")
    assert launched.process.stdout is not None
    first = launched.process.stdout.readline()  # while the bar is visible
    assert first.startswith(b"[localhost:0] ")
    assert first.endswith(b"%\n")
    (launched.folder / "go").touch()
    code, out = launched.end()
    assert code == 0, (launched.folder / "err").read_text()
    lines = [first.decode().rstrip(), *out.splitlines()]
    assert lines[-2:] == ["[localhost:0] 99%", "[localhost:0] \\ufffd\0\\u2713"]
    bars = "".join(f"\r{i}%" for i in range(100)).encode()
    assert launched.written() == bars + b"\n\xff\0\xe2\x9c\x93\n"


def test_sighup_ends_run_except_with_nohup(launch: Callable[..., Launched]) -> None:
    launched = launch(f"{UNTIL_GO}\nprint('began', flush=True)\nwait()\n", prefix=["nohup"])
    launched.until("it waits", launched.ticks)
    before = launched.ticks()
    launched.process.send_signal(signal.SIGHUP)
    launched.until("it continues", lambda: launched.ticks() > before + 10)
    (launched.folder / "go").touch()
    assert launched.end()[0] == 0


def test_ctrl_c_before_start_is_no_preemption(launch: Callable[..., Launched]) -> None:
    launched = launch("import time; time.sleep(1000)", silence_s=60.0)

    def launcher_is_there() -> bool:
        return launched.process.poll() is not None or any(
            "zerotrial.process.launch" in child.cmdline() and catches_sigterm(child.pid)
            for child in psutil.Process(launched.process.pid).children(recursive=True)
        )

    until("it notes SIGTERM", launcher_is_there, not_yet=(psutil.Error, OSError, StopIteration))
    assert launched.process.poll() is None, (launched.folder / "err").read_text()
    launched.process.send_signal(signal.SIGINT)
    assert launched.end() == (128 + signal.SIGTERM, "")


def test_stop_right_after_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import time; time.sleep(1000)")
    launch_plan = plan({"cpu": True}, num_gpus=1)
    job = Job(run=launch_plan.run, environment={}, nodes=None, slots=(0,), silence_s=300.0)
    with subprocess.Popen(
        local_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        node.stdin.write(encode(job) + encode(Stop(5.0)))
        node.stdin.flush()
        messages = [decode_from_worker(line) for line in node.stdout]
        node.stdin.close()
    (end,) = [message.outcome for message in messages if isinstance(message, Ended)]
    assert end.was_stopped, msgspec.json.encode(end)
    assert end.exit_code < 0


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[View, Callable[[bytes], None]]]:
    file = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(file, b"of an earlier launch\n")

    def write(content: bytes) -> None:
        os.write(file, content)

    yield View(file, "here:0", "out"), write
    os.close(file)


def all_lines(view: View) -> list[str]:
    lines_found: list[str] = []
    while (lines := view.lines()) is not None:
        lines_found += lines
    return lines_found


def test_view_of_redrawn_lines(
    written: tuple[View, Callable[[bytes], None]],
) -> None:
    view, write = written
    assert view.lines() is None
    write(b"one\r\ntwo\n\nthr")
    assert all_lines(view) == ["one", "two", ""]
    assert view.state() is None
    write(b"ee\n\r1%\r2%")
    assert (all_lines(view), view.state(), view.state()) == (["three"], "2%", None)
    write(b"\r3%")
    assert (all_lines(view), view.state()) == ([], "3%")
    write(b"\r    \r\n")  # it is cleared: the shown text remains
    assert all_lines(view) == []
    write(b"\r1%\r2%\r\x1b[K\r  \n")
    assert all_lines(view) == ["2%"]
    write("\r✓".encode()[:-1])
    assert (all_lines(view), view.state()) == ([], None)
    write("\r✓".encode()[-1:])
    assert (all_lines(view), view.state()) == ([], "✓")
    write(b"\nlast")
    assert (all_lines(view), view.rest(), view.rest()) == ([], "last", None)


@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
@pytest.mark.parametrize("letter", ["ü", "✓", "😀"])
def test_long_line_is_split_between_characters(
    written: tuple[View, Callable[[bytes], None]], before: str, letter: str
) -> None:
    view, write = written
    text = before + letter * 200_000
    write(f"{text}\nend".encode())
    lines = all_lines(view)
    assert len(lines) > 1
    assert "".join(lines) == text
    assert view.rest() == "end"


def test_message_follows_earlier_output(
    written: tuple[View, Callable[[bytes], None]], capfd: pytest.CaptureFixture[str]
) -> None:
    view, write = written
    view.stream = "err"  # as the sentence
    printer = Printer()
    printer.add(view)
    write(b"x" * 99 + b"\n")
    write((b"y" * 99 + b"\n") * 5000)
    printer.enqueue(view)
    printer.print_message("it has ended")
    assert printer.close()
    lines = capfd.readouterr().err.splitlines()
    assert (len(lines), lines[-1]) == (5002, "it has ended")


def test_redrawn_line_uses_bounded_memory(
    written: tuple[View, Callable[[bytes], None]],
) -> None:
    view, write = written
    for i in range(20):
        write(b"".join(b"\r%d of many" % j for j in range(1000 * i, 1000 * (i + 1))))
        assert all_lines(view) == []
        assert len(view._rest) < 100
    assert view.state() == "19999 of many"
