"""The commands of Determined's ``det`` that are others here."""

__all__ = ["COMMANDS", "instead_of_command"]

_ONE_USER = (
    "there are no users: a token is the right to do all; `zerolab open` signs a browser in, "
    "`zerolab token` prints the token for `ZEROLAB_TOKEN`, and `--master` names a server"
)
_SLOTS = "`zerolab agent list` shows slots; `zerolab agent disable AGENT --slot N` takes one away"
_SHELL = "use the machine itself (ssh, your own JupyterLab); `zerolab task run` queues a command"
_TASK = "`zerolab task run`, then `zerolab task list`, `zerolab task logs`, `zerolab task stop`"
_LABELS = "there are no workspaces and projects: `labels` of the experiment file, and `--name`"
_SERVER = "`zerolab status`; the server writes `logs/server.log` in the data directory"
_TENSORBOARD = (
    "`zerolab open`: the page draws every metric; `tensorboard --logdir` reads what a trial's own "
    "writer has left in `runs/` of the data directory"
)
_TEMPLATES = "keep what files share in a file of your own, and begin each as a copy of it"

COMMANDS: dict[str, str] = {
    "auth": _ONE_USER,
    "agent label": "`zerolab agent start --pool NAME`",
    "checkpoint rm": "`zerolab checkpoint delete UUID`",
    "command": _TASK,
    "config-policies": "`zerolab quota set` limits slots; `zerolab pool set` says who goes first",
    "deploy": "`zerolab up` starts a server and an agent here, `zerolab down` stops both",
    "dev": "`curl` with the token of `zerolab token`; the routes stand in docs/rest.md",
    "experiment create": "`zerolab submit CONFIG [MODEL_DIR]`, or `zerolab run CONFIG [MODEL_DIR]` "
    "to follow it; values of `--config` go into the file",
    "experiment delete-tensorboard-files": "`zerolab experiment delete`",
    "experiment download": "`zerolab checkpoint download UUID DIRECTORY`, for each of "
    "`zerolab checkpoint list`",
    "experiment download-model-def": "the page's *Code* shows it; `zerolab experiment fork` "
    "submits it again",
    "experiment label": "`zerolab experiment change ID --label A --label B`: all that it has",
    "experiment list-checkpoints": "`zerolab checkpoint list EXPERIMENT_ID`",
    "experiment list-trials": "`zerolab trial list EXPERIMENT_ID`",
    "experiment move": _LABELS,
    "experiment resume": "`zerolab experiment activate ID`; of one that has ended "
    "`zerolab experiment continue ID`",
    "experiment set": "`zerolab experiment change` (name, description), `zerolab job set` "
    "(priority, weight, max-slots), `zerolab checkpoint gc` (how many checkpoints are kept)",
    "experiment test": "`zerolab run --test CONFIG`",
    "job update": "`zerolab job set priority ID N` (or weight), `zerolab job move ID --ahead-of N`",
    "job update-batch": "`zerolab job set priority ID N`, for each",
    "master": _SERVER,
    "model list-versions": "`zerolab model describe NAME`",
    "model move": _LABELS,
    "notebook": _SHELL,
    "oauth": _ONE_USER,
    "preview-search": "`zerolab experiment preview CONFIG`",
    "project": _LABELS,
    "rbac": _ONE_USER,
    "resource-pool": "`zerolab pool list`; a pool is made by `zerolab agent start --pool NAME`",
    "resources": "`zerolab experiment describe` and `zerolab trial list` tell slot time",
    "shell": _SHELL,
    "slot": _SLOTS,
    "task create": "`zerolab task run`",
    "task kill": "`zerolab task stop --kill NAME`",
    "template": _TEMPLATES,
    "tensorboard": _TENSORBOARD,
    "trial download": "`zerolab checkpoint list EXPERIMENT_ID --trial N`, then "
    "`zerolab checkpoint download UUID DIRECTORY`",
    "trial list-checkpoints": "`zerolab checkpoint list EXPERIMENT_ID --trial N`",
    "trial support-bundle": "`zerolab trial describe --json`, `zerolab trial logs`",
    "user": _ONE_USER,
    "user-group": _ONE_USER,
    "workspace": _LABELS,
}
"""Words behind ``det`` to what they are here; words count for all that may follow them."""


_SHORT = {
    "cmd": "command",
    "lc": "list-checkpoints",
    "lt": "list-trials",
    "rp": "resource-pool",
    "tb": "tensorboard",
    "tpl": "template",
    "u": "update",
}
"""Its short words for some of them."""


def instead_of_command(*words: str) -> str | None:
    """Say what a command of Determined's is here; None where it has none of these words."""
    return COMMANDS.get(" ".join(_SHORT.get(word, word) for word in words)) or COMMANDS.get(
        " ".join(words)
    )
