"""Fields of Determined's experiment files that have no counterpart here, and what to do instead."""

from typing import Any

from zerolab.config.refusing import EMPTY, Off, Refused
from zerolab.searcher.registry import SEARCHERS

__all__ = ["OTHER_SEARCHERS", "REFUSED_FIELDS", "REMOVED_BACKEND", "STRANGERS"]

_NO_CONTAINERS = "trials run in the agent's own Python environment, not in containers"

_INSTEAD: dict[str, str] = {
    "workspace": "use labels",
    "project": "use labels",
    "bind_mounts": f"{_NO_CONTAINERS}: use the paths of the machine",
    "optimizations": "set the keys of the engine file, such as gradient_accumulation_steps",
    "integrations": "report from a trial callback",
    "slurm": "start an agent inside a Slurm job, and submit to it",
    "pbs": "start an agent inside a PBS job, and submit to it",
    "security": "remove it; the agent's own user runs the trials",
    "tensorboard_storage": "remove it; TensorBoard files are kept with the trial",
    "data_layer": "remove it; read data in the trial",
    "internal": "remove it",
    "debug": "remove it; logs hold everything that ranks print",
    "resources.agent_label": "start those agents with --pool NAME; set resource_pool to NAME",
    "resources.slots": "set resources.slots_per_trial",
    "resources.shm_size": f"{_NO_CONTAINERS}: shared memory is the machine's",
    "resources.devices": f"{_NO_CONTAINERS}: devices are the machine's",
    "resources.native_parallel": "remove it; one process is started for each slot",
    "environment.image": f"{_NO_CONTAINERS}: install packages there",
    "environment.force_pull_image": _NO_CONTAINERS,
    "environment.registry_auth": _NO_CONTAINERS,
    "environment.add_capabilities": _NO_CONTAINERS,
    "environment.drop_capabilities": _NO_CONTAINERS,
    "environment.pod_spec": _NO_CONTAINERS,
    "environment.proxy_ports": _NO_CONTAINERS,
    "environment.ports": _NO_CONTAINERS,
    "template": "write what it holds into the file",
    "work_dir": "remove it; commands run in the model directory",
    "parent_id": "remove it; tasks have no parents",
    "inherit_context": "remove it; submit the model directory itself",
    "batches_per_step": "set scheduling_unit",
    "searcher.unit": "say it with max_length, e.g. {batches: 1000}",
    "searcher.max_steps": "set max_length",
    "searcher.target_trial_steps": "set max_length",
    "searcher.step_budget": "set max_trials",
    "searcher.train_stragglers": "remove it; set stop_once: false for trials that wait at rungs",
    "checkpoint_storage.propagation": _NO_CONTAINERS,
    "checkpoint_storage.checkpoint_path": "set host_path and storage_path",
    "checkpoint_storage.tensorboard_path": "remove it; TensorBoard files are kept with the trial",
}
"""Dotted field to what the user should do instead."""

REMOVED_BACKEND = (
    "remove it to train with Zerolab's engine; for DeepSpeed's own engine call "
    "deepspeed.initialize() in the trial and give the engine to context.wrap_model_engine()"
)
"""Replacement of ``backend: deepspeed``."""

REFUSED_FIELDS = {field: Refused(instead, EMPTY) for field, instead in _INSTEAD.items()} | {
    "backend": Refused(
        REMOVED_BACKEND,
        Off(f"`zerolab`, {EMPTY.text}", lambda value: value == "zerolab" or EMPTY.holds(value)),
    ),
}
"""By dotted field."""

OTHER_SEARCHERS: dict[str, str] = {
    name: f"must be one of {', '.join(SEARCHERS)}; {name} is {instead} here"
    for name, instead in {
        "sync_halving": "async_halving",
        "adaptive": "adaptive_asha",
        "adaptive_simple": "adaptive_asha",
    }.items()
}
"""Searchers that do not exist here."""

STRANGERS: dict[str, tuple[str, dict[str, str], frozenset[str], dict[str, Any]]] = {
    "searcher": (
        "name",
        OTHER_SEARCHERS,
        frozenset(
            [
                "max_time",
                "time_metric",
                "divisor",
                "max_rungs",
                "num_rungs",
                "mode",
                "bracket_rungs",
                "unit",
            ]
        ),
        {"name": "random", "max_trials": 1, "max_length": 1},
    ),
}
"""Block to the key that chooses its kind, the kinds that do not exist here, the fields that only
they have, and what a kind that exists would say."""
