"""``python -m zerotrial.extensions.deepspeed_api [-m MODULE | SCRIPT] args``: run a script."""

import runpy
import sys
from pathlib import Path

from zerolab.errors import ZerolabError
from zerotrial.extensions.deepspeed_api import install

_USAGE = "usage: python -m zerotrial.extensions.deepspeed_api [-m MODULE | SCRIPT] [ARGUMENTS]"


def main() -> None:
    """Install, then become the script."""
    arguments = sys.argv[1:]
    module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + module or arguments[0] in {"-h", "--help"}:
        sys.stderr.write(_USAGE + "\n")
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    try:
        install()
    except ZerolabError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    if module:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        sys.stderr.write(f"{script}: there is no such file; {_USAGE}\n")
        sys.exit(2)
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
