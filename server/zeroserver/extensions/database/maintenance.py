"""Program started by `zerolab db`, since the command line imports no database library."""

import argparse
import os
import sys
from pathlib import Path

from zerolab.errors import ConflictError, ZerolabError
from zerolab.files import lock_file
from zerolab.paths import Home
from zeroserver.extensions.database import restore
from zeroserver.store import backup
from zeroserver.store.database import Database
from zeroserver.store.engine_factory import check_url, sqlite_url, take_database

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit code: 0 success, 1 problems found, 2 error."""
    options = _parser().parse_args(arguments)
    os.umask(0o077)
    home = Home(Path(options.home).absolute()) if options.home else Home.default()
    url = take_database(options.database)
    try:
        check_url(url)
    except ZerolabError as error:
        sys.stderr.write(f"zerolab: {error}\n")
        return 2
    database = Database(url or sqlite_url(home.database), lambda _changes: None)
    try:
        return int(options.run(options, home, database))
    except ZerolabError as error:
        sys.stderr.write(f"zerolab: {error}\n")
        return 2
    finally:
        database.close()


def _back_up(options: argparse.Namespace, home: Home, database: Database) -> int:
    target = Path(options.target).absolute() if options.target else None
    sys.stdout.write(f"{backup.back_up(database, home, target)}\n")
    return 0


def _restore(options: argparse.Namespace, home: Home, database: Database) -> int:
    home.create()
    try:
        lock = lock_file(home.path / "server.lock")
    except BlockingIOError:
        msg = f"a server is running on {home.path}; stop it with `zerolab down` before you restore"
        raise ConflictError(msg) from None
    with lock:
        before = restore.restore(database, home, Path(options.source).absolute())
    if before is not None:
        sys.stderr.write(f"a backup of the previous database is in {before}\n")
    sys.stderr.write(f"{database.name} is restored; start the server with `zerolab up`\n")
    return 0


def _check(_options: argparse.Namespace, home: Home, database: Database) -> int:
    problems = restore.check(database, home)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    if not problems:
        sys.stdout.write(f"{database.name}: ok\n")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zerolab db", description=__doc__)
    parser.add_argument("--home", help="data directory (default: ZEROLAB_HOME or ~/.zerolab)")
    parser.add_argument(
        "--database", default="", help="postgresql://USER@HOST/NAME (default: SQLite)"
    )
    commands = parser.add_subparsers(required=True)
    save = commands.add_parser("backup", help="write a backup; the server may run")
    save.add_argument("target", nargs="?", help="directory to create (default: in backups/)")
    save.set_defaults(run=_back_up)
    load = commands.add_parser("restore", help="replace the database; the server must not run")
    load.add_argument("source", help="directory of a backup")
    load.set_defaults(run=_restore)
    look = commands.add_parser("check", help="read the complete database and print problems")
    look.set_defaults(run=_check)
    return parser


if __name__ == "__main__":
    sys.exit(main())
