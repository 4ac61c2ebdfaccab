"""``python -m zerolab.compat.wandb SCRIPT args``: run a script whose wandb reports to Zerolab."""

import runpy
import sys
from pathlib import Path

from zerolab.extensions.wandb_api import install


def main() -> None:
    """Install the replacement, then become the script."""
    script = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if script is None or not script.is_file():
        usage = "usage: python -m zerolab.compat.wandb SCRIPT [ARGUMENTS]"
        problem = "" if script is None else f"{script}: there is no such file; "
        sys.stderr.write(f"{problem}{usage}\n")
        sys.exit(2)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.resolve().parent)
    install()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
