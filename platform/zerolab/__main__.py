"""``python -m zerolab`` is the command ``zerolab``."""

from zerolab.cli.main import main

if __name__ == "__main__":
    main()
