"""Launcher of one run; the platform starts it as a process, since only this package imports torch.

```
python -m zerotrial.process.launch PARENT RUN_JSON        run all ranks (zerotrial.process.launcher)
python -m zerotrial.process.launch --serve PARENT FD      fork such launchers on demand
python -m zerotrial.process.launch --rank LAUNCHER        run one rank of a trial class
```

It dies with its parent process ``PARENT``, together with all processes that its ranks started.
"""

import logging
import shlex
import sys
from pathlib import Path

from zerolab.linux import die_with_parent, own_process_tree
from zerotrial.process.launcher import DeferredSigterm, run_launcher
from zerotrial.process.supervisor import run_rank

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run all ranks of a run, serve forks, or run one rank."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    match arguments:
        case ["--rank", launcher]:
            run_rank(int(launcher))
            return 0
        case ["--serve", parent, channel]:
            die_with_parent(int(parent))
            from zerotrial.process.fork_server import serve

            return serve(int(channel))
        case [parent, spec_file] if parent.isdecimal():
            sigterm = DeferredSigterm()
            own_process_tree(int(parent))
            return run_launcher(Path(spec_file).absolute(), sigterm)
    usage = "python -m zerotrial.process.launch PARENT RUN_JSON"
    print(f"usage: {usage}, got {shlex.join(arguments)!r}", file=sys.stderr)  # noqa: T201 - usage
    return 2


if __name__ == "__main__":
    sys.exit(main())
