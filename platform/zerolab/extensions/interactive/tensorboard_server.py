"""TensorBoard on a socket file: ``python -m ...tensorboard_server LOGDIR SOCKET``."""

import sys

from tensorboard import program

__all__ = ["main"]


# TensorBoard has no types.
class _SocketServer(program.WerkzeugServer):  # type: ignore[misc]
    def get_url(self) -> str:
        """Return a stand-in, from which TensorBoard reads a port."""
        return "http://task:1/"

    def print_serving_message(self) -> None:
        """Print nothing: the task prints its address."""


def main() -> None:
    """Serve the event files of a directory."""
    logdir, path = sys.argv[1:]
    board = program.TensorBoard(server_class=_SocketServer)
    board.configure(
        ["tensorboard", f"--logdir={logdir}", f"--host=unix://{path}", "--port=1",
         "--reload_interval=15", "--load_fast=false"]
    )  # fmt: skip
    sys.exit(board.main())


if __name__ == "__main__":
    main()
