"""Names of wandb without a counterpart, and what to use instead."""

__all__ = ["UNSUPPORTED", "advice"]

_PLOT = "use wandb.Table or wandb.Image; the page draws curves of all logged numbers"
UNSUPPORTED = {
    "Api": "use `zerolab.Client()`: experiments, trials, metrics and files of a server",
    "PublicApi": "use `zerolab.Client()`",
    "sweep": "use a searcher in an experiment file, and `zerolab submit`",
    "agent": "use `zerolab submit`: agents of Zerolab start the trials of a search",
    "controller": "use a searcher in an experiment file",
    "plot": _PLOT,
    "plot_table": _PLOT,
    "Plotly": _PLOT,
    "Video": "use wandb.Image for single frames, or wandb.save for the file",
    "Object3D": "use wandb.save for the file",
    "Molecule": "use wandb.save for the file",
    "Bokeh": "use wandb.Html",
    "Graph": "use wandb.Html or wandb.Image",
    "Classes": "use wandb.Table",
    "JoinedTable": "use wandb.Table",
    "alert": "use notifications of Zerolab, which send messages about experiments to webhooks",
    "use_artifact": "use `zerolab.Client()` to download files and checkpoints of a trial",
    "link_artifact": "use the model registry: `zerolab model`",
    "log_model": "use log_artifact, or a checkpoint of Zerolab",
    "link_model": "use the model registry: `zerolab model`",
    "use_model": "use the model registry: `zerolab model`",
    "restore": "use `zerolab artifact download`",
    "sync": "use `zerolab sync`",
    "integration": "use transformers' or Lightning's logger, or call wandb.log",
    "keras": "call wandb.log",
    "init(sync_tensorboard)": "use `zerolab import` for the event files",
    "init(fork_from)": "use another id",
    "init(resume_from)": "use id, and log further steps",
}
"""Name to a sentence that begins with a verb."""


def advice(name: str) -> str | None:
    """Return the message about a name without a counterpart; None if the name is unknown.

    Args:
        name: Name of a module, a function, a class or a method of wandb.
    """
    hint = UNSUPPORTED.get(name)
    return None if hint is None else f"wandb.{name} has no counterpart in Zerolab; {hint}"
