"""Shell completion of ids, states and fields, without a shell."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from tests.server.helpers import Server
from tests.server.processes import played
from zerolab.cli.connection import complete_from_server
from zerolab.cli.main import app

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with played(tmp_path_factory.mktemp("completion")) as (_, owner):
        owner.submit(name="digits", activate=False)
        yield owner


Complete = Callable[..., list[str]]


@pytest.fixture
def complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Complete:
    """Return a function that completes the last word of a line, which may be empty."""

    def run(line: str, **variables: str) -> list[str]:
        monkeypatch.setenv("_ZEROLAB_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        monkeypatch.setenv("ZEROLAB_HOME", str(tmp_path / "home"))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            app(args=[], prog_name="zerolab")
        assert not end.value.code
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out.split()

    return run


def test_fixed_values_need_no_server(complete: Complete) -> None:
    states = ["ACTIVE", "PAUSED", "COMPLETED", "CANCELED", "ERROR"]
    assert complete("zerolab experiment list --state ") == states
    assert complete("zerolab experiment list --state CO") == ["COMPLETED"]
    assert "-best_validation" in complete("zerolab experiment list --sort ")
    assert complete("zerolab logs --level W") == ["WARNING"]
    assert complete("zerolab init a --template a") == ["accelerate"]
    assert "experiment" in complete("zerolab exp")


def test_ids_come_from_the_server(owner: Server, complete: Complete) -> None:
    server = {
        "ZEROLAB_MASTER": str(owner.http.base_url),
        "ZEROLAB_TOKEN": owner.token,
    }
    assert complete("zerolab experiment describe ", **server) == ["1"]
    assert complete("zerolab e pause 2", **server) == []
    assert complete("zerolab trial logs ", **server) == ["1"]
    assert "best_validation" in complete("zerolab trial list 1 --sort best", **server)


def test_silent_server_completes_nothing(complete: Complete) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert complete("zerolab experiment describe ", ZEROLAB_MASTER=address) == []


def test_shell_gets_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells evaluate completions; names of experiments and metrics may come from others."""
    values = [("1", "a $(rm x)`id`'\"\\"), ("$(id)", ""), ("loss/train-1", "ok (1)"), ("a b", "")]
    monkeypatch.setenv("ZEROLAB_MASTER", "http://127.0.0.1:9")
    list_values = complete_from_server(lambda _client, _context: values)
    context = typer.Context(typer.main.get_command(app))
    assert list_values(context, "") == [("1", "a ?(rm x)?id????"), ("loss/train-1", "ok (1)")]


def test_failed_listing_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_client: object, _context: object) -> list[tuple[object, str]]:
        raise RuntimeError

    monkeypatch.setenv("ZEROLAB_MASTER", "http://127.0.0.1:9")
    context = typer.Context(typer.main.get_command(app))
    assert complete_from_server(fail)(context, "") == []
    assert capsys.readouterr() == ("", "")


def test_no_server_completes_nothing(complete: Complete, tmp_path: Path) -> None:
    assert complete("zerolab experiment describe ") == []
    assert not (tmp_path / "home").exists()
