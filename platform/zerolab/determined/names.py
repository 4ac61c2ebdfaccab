"""Determined's names in Python, and what takes the place of each."""

from collections.abc import Mapping

__all__ = [
    "CHECKPOINT",
    "CONTEXT",
    "DISTRIBUTED",
    "INIT_ARGUMENTS",
    "MODULES",
    "OF_DEEPSPEED",
    "PREEMPT",
    "RUNS_THERE",
    "TRAIN",
    "TRIAL_CONTEXT",
    "missing",
    "name_of",
    "short_names",
]

_RANKS = "leave it out: `zerolab.core.init()` finds the ranks from torchrun's variables"
_CLASS = "`zerotrial.ZeroTrial`"
_INFO = (
    "the context of `zerolab.core.init()` (`zerotrial.init()` in a script with a trial class): "
    "`context.train.info` (trial class: `context.spec`), whose `trial_id` has no `.trial` "
    "before it; `.get_hparams()`, `.latest_checkpoint`"
)
_SEARCH = (
    "a class with the methods of `zerolab.searcher.Searcher`, named by `searcher.entrypoint` "
    "of `searcher.name: custom`"
)
_BATCHES = "`zerolab.core.init()` and a loop over this rank's part of the data"

MODULES: dict[str, str] = {
    "determined.InvalidHP": "`zerotrial.InvalidHP`; in a script without a trial class "
    "`zerolab.errors.InvalidHyperparametersError`",
    "determined.LOG_FORMAT": "leave it out: rank and time stand beside each line of the logs",
    "determined.core": "`zerolab.core`",
    "determined.core.Context": "`zerolab.core.Context`",
    "determined.core.DistributedContext": _RANKS,
    "determined.core.PreemptMode": "leave it out: every rank asks `should_preempt()`",
    "determined.core.TensorboardMode": "leave it out: write TensorBoard files where you want them",
    "determined.core.init": "`zerolab.core.init()`",
    "determined.experimental.client": "`zerolab.client.Client(url, token)`",
    "determined.experimental.core_v2": "`zerolab.core.init()`: without a server it keeps metrics "
    "and checkpoints in a directory, and `zerolab import` brings the metrics into one",
    "determined.experimental.unmanaged": "`zerolab.core.init()`, then `zerolab import`",
    "determined.get_cluster_info": _INFO,
    "determined.keras": "nothing: there is no Keras here; a loop of your own with "
    "`zerolab.core.init()`",
    "determined.launch": "leave it out: one process is started for each slot",
    "determined.lightning": "`zerolab.core.init()` around Lightning's own trainer",
    "determined.profiler": "leave it out: CPU, memory and GPU are measured in any case",
    "determined.pytorch.Batch": "`zerotrial.Batch`",
    "determined.pytorch.DataLoader": "`zerotrial.DataLoader`",
    "determined.pytorch.Epoch": "`zerotrial.Epoch`",
    "determined.pytorch.LRScheduler": "the `scheduler` of the engine file, or `lr_scheduler=` of "
    "`zerotrial.initialize`",
    "determined.pytorch.MetricReducer": "`zerotrial.MetricReducer`",
    "determined.pytorch.PyTorchCallback": "`zerotrial.Callback`",
    "determined.pytorch.PyTorchTrial": f"{_CLASS}, whose batches come from an iterator",
    "determined.pytorch.PyTorchTrialContext": "`zerotrial.ZeroTrialContext`",
    "determined.pytorch.Reducer": "`zerotrial.Reducer`",
    "determined.pytorch.TorchData": "`zerotrial.TorchData`",
    "determined.pytorch.Trainer": "`zerotrial.Trainer`",
    "determined.pytorch.deepspeed.DeepSpeedTrial": _CLASS,
    "determined.pytorch.deepspeed.DeepSpeedTrialContext": "`zerotrial.ZeroTrialContext`",
    "determined.pytorch.deepspeed.ModelParallelUnit": "`zerotrial.ModelParallelUnit`",
    "determined.pytorch.deepspeed.DeepSpeedMPU": "leave it out: ranks of pipeline stages are known",
    "determined.pytorch.deepspeed.Trainer": "`zerotrial.Trainer`",
    "determined.pytorch.deepspeed.init": "`zerotrial.init`",
    "determined.pytorch.deepspeed.make_deepspeed_mpu": "leave it out where the engine is a "
    "pipeline's; else a `zerotrial.ModelParallelUnit(...)` for `context.set_mpu`",
    "determined.pytorch.deepspeed.overwrite_deepspeed_config": "the same name in `zerotrial`",
    "determined.pytorch.dsat": "`zerolab plan` (what fits), and a search over "
    "`overwrite_deepspeed_args`; a Trainer of transformers takes `training_arguments` by itself",
    "determined.pytorch.experimental.TorchBatchProcessContext": _BATCHES,
    "determined.pytorch.experimental.TorchBatchProcessor": _BATCHES,
    "determined.pytorch.experimental.torch_batch_process": _BATCHES,
    "determined.pytorch.init": "`zerotrial.init`",
    "determined.pytorch.load_trial_from_checkpoint_path": "`zerolab checkpoint download`, then "
    "`engine.load_checkpoint`, or its export to one safetensors file",
    "determined.pytorch.samplers": "`zerotrial.data.samplers`",
    "determined.searcher": _SEARCH,
    "determined.tensorboard": "`context.get_tensorboard_writer()`",
    "determined.transformers": "leave it out: a Trainer of transformers reports, saves and stops "
    "by itself in an experiment",
}
"""Dotted name in Determined to what takes its place; a name counts for all below it."""

RUNS_THERE = (
    "determined.core",
    "determined.experimental.core_v2",
    "determined.experimental.unmanaged",
    "determined.get_cluster_info",
    "determined.keras",
    "determined.launch",
    "determined.lightning",
    "determined.pytorch",
    "determined.searcher",
    "determined.transformers",
)
"""Names with which a script asks Determined to run it; the others may serve any script."""

OF_DEEPSPEED = frozenset(
    {"accelerator", "checkpointing", "comm", "get_accelerator", "ops", "pipe", "utils", "zero"}
)
"""Names with which a DeepSpeedTrial asks DeepSpeed for more than ``initialize``."""

INIT_ARGUMENTS: dict[str, str] = {
    "distributed": _RANKS,
    "preempt_mode": "leave it out: every rank asks `should_preempt()`",
    "tensorboard_mode": "leave it out: write TensorBoard files where you want them",
    "config": "leave it out: a script on its own has no experiment file; name its `directory`",
    "defaults": "leave it out: a script on its own has no experiment file; name its `directory`",
    "client": "leave it out: `zerolab import` brings the metrics into a server afterwards",
    "unmanaged": "leave it out: without a server a script works on its own",
}
"""Arguments of ``determined.core.init`` and ``core_v2.init``."""

CONTEXT: dict[str, str] = {
    "searcher": "train to `context.train.until`, report a validation there, and ask "
    "`context.preempt.should_preempt()`",
    "profiler": "leave it out: CPU, memory and GPU are measured in any case",
    "alert": "write it to the log, and label it with `log_policies`",
}
"""Attributes of the Core API's context."""

TRAIN: dict[str, str] = {
    "report_early_exit": "raise `zerolab.errors.InvalidHyperparametersError`",
    "get_experiment_best_validation": "ask `zerolab.client.Client`, or leave it to the searcher",
    "get_tensorboard_path": "write TensorBoard files to a folder of your own",
    "upload_tensorboard_files": "write TensorBoard files to a folder of your own",
    "set_status": "leave it out, or write it to the log",
    "set_metadata": "report it as a metric, or write it into the `metadata` of a checkpoint",
    "get_metadata": "read `context.checkpoint.get_metadata(uuid)`",
    "log": "write it to the log",
    "_report_trial_metrics": "call report_metrics(group, steps_completed, metrics)",
}
"""Attributes of the Core API's ``train``."""

CHECKPOINT: dict[str, str] = {
    "delete": "`zerolab checkpoint delete`, or the counts of `checkpoint_storage`",
}
"""Attributes of the Core API's ``checkpoint``."""

PREEMPT: dict[str, str] = {
    "acknowledge_preemption_signal": "leave it out: what `should_preempt()` answers counts",
}
"""Attributes of the Core API's ``preempt``."""

_LOCAL = "use allgather(value), and look at local_rank"

DISTRIBUTED: dict[str, str] = {
    "gather": "use allgather(value)",
    "gather_local": _LOCAL,
    "allgather_local": _LOCAL,
    "broadcast_local": _LOCAL,
    "cross_rank": "it is rank // local_size",
    "cross_size": "call get_num_agents()",
    "from_torch_distributed": "leave it out: the ranks are found",
    "from_deepspeed": "leave it out: the ranks are found",
    "from_horovod": "leave it out: the ranks are found",
}
"""Attributes of ranks."""

_ENGINE = "pass it to zerotrial.initialize, and the engine to wrap_model_engine"

TRIAL_CONTEXT: dict[str, str] = {
    "backward": "call engine.backward(loss)",
    "configure_apex_amp": "set fp16.enabled or bf16.enabled in the engine file",
    "env": "call get_trial_seed(), get_experiment_config(), get_hparams()",
    "experimental": "its methods are the context's own, such as wrap_reducer",
    "get_train_global_batch_size": "call get_global_batch_size()",
    "n_gpus": "it is distributed.size",
    "step_optimizer": "call engine.step()",
    "train_batch_size": "call get_global_batch_size()",
    "wrap_lr_scheduler": _ENGINE,
    "wrap_model": _ENGINE,
    "wrap_mpu": "call set_mpu",
    "wrap_optimizer": _ENGINE,
    "wrap_scaler": "set fp16.enabled in the engine file",
}
"""Attributes of a trial's context."""


def name_of(name: str) -> str | None:
    """Return the longest part of a dotted name that is known; None if none of it is."""
    parts = name.split(".")
    longest = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
    return next((part for part in longest if part in MODULES), None)


def short_names(module: str) -> dict[str, str]:
    """Return the last words of what is known directly below a module, and what replaces each."""
    found = (name.rpartition(".") for name in MODULES)
    return {last: MODULES[f"{above}.{last}"] for above, _, last in found if above == module}


def missing(
    what: str, owner: object, name: str, instead: Mapping[str, str], otherwise: str = ""
) -> AttributeError:
    """Make the error for an attribute that is not there.

    Args:
        what: Who was asked, in words.
        owner: Who was asked.
        name: For what.
        instead: Determined's attributes to what takes the place of each.
        otherwise: What is said where Determined has none of that name, too.
    """
    hint = f"; {instead[name]}" if name in instead else otherwise
    return AttributeError(f"{what} has no attribute {name!r}{hint}", name=name, obj=owner)
