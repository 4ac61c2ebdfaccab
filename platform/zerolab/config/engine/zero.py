"""The ``zero_optimization`` block: sharding, communication and offloading."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zerolab.schema.section import Fraction, Int, NonNegativeInt, PositiveInt, Section, hint

__all__ = [
    "LIVE_LIMIT",
    "LeafModuleConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "ZeroConfig",
]


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be 0, 1, 2 or 3, got {value}")
    return value


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_number)]

Shards = Annotated[Int, Field(ge=-1)]

LIVE_LIMIT = 1_000_000_000
"""DeepSpeed's default of ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``, in
elements; it applies to the one that a file leaves out."""

_BY_BLOCK = "stage 3 gathers and releases whole blocks of the model"


class OffloadParamConfig(Section):
    """Storage of sharded parameters between uses (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """``cpu`` keeps the shards in host memory, ``nvme`` keeps shards and gradients in files."""

    pin_memory: bool = True
    """Page-locked host memory, for copies that overlap with computation (GPU only)."""

    nvme_path: str | None = None
    """Directory for the files of ``device: nvme``."""

    buffer_count: NonNegativeInt = hint(5, "files are mapped, the next block's is read ahead")
    """Buffers for parameters in files."""

    buffer_size: NonNegativeInt = hint(100_000_000, "files are mapped, and need no buffers")
    """Elements in one buffer for parameters in files."""

    max_in_cpu: NonNegativeInt = hint(
        1_000_000_000, "the system keeps in its cache what there is room for"
    )
    """Elements kept in host memory when the rest is in files."""


class OffloadOptimizerConfig(Section):
    """Storage of optimizer states and master weights (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """``cpu`` keeps the states in host memory and updates there, ``nvme`` keeps them in files."""

    nvme_path: str | None = None
    """Directory for the files of ``device: nvme``."""

    pin_memory: bool = True
    """Page-locked host memory, for copies that overlap with computation (GPU only)."""

    buffer_count: NonNegativeInt = hint(4, "three buckets are in flight: read, updated, written")
    """Buffers for states in files."""

    pipeline_read: bool = hint(False, "the next bucket is always read ahead")
    """Read the next tile while this one is updated."""

    pipeline_write: bool = hint(False, "the last bucket is always written behind")
    """Write the last tile while this one is updated."""

    fast_init: bool = hint(False, "zeros are never written; a state is written when it is made")
    """Skip writing the first zeros."""

    ratio: Fraction = 1.0
    """Share of the states that is offloaded; only 1 is supported."""

    cpuadam_cores_perc: Fraction = hint(0.8, "OMP_NUM_THREADS sets the number of cores")
    """Share of the cores for the update."""


class LeafModuleConfig(Section):
    """Modules that stage 3 gathers in one collective."""

    classes: list[str] = Field(default_factory=list)
    """Class names of modules that are gathered in one collective, with their submodules (stage 3),
    with or without the Python module: ``Block`` or ``my_models.blocks.Block``."""

    names: list[str] = hint([], "name the classes; they are found anywhere in the model")
    """Module names."""

    name_suffixes: list[str] = hint([], "name the classes; they are found anywhere in the model")
    """Ends of module names."""


class ZeroConfig(Section):
    """Sharding of the training state over the data-parallel ranks."""

    stage: Stage = 0
    """0: nothing is sharded; 1: optimizer states; 2: and gradients; 3: and parameters."""

    reduce_bucket_size: PositiveInt = 500_000_000
    """Gradient elements in one collective, clamped to the model (stages 0 to 2). By default the
    engine chooses a size at which reduction overlaps backward."""

    allgather_bucket_size: PositiveInt = 500_000_000
    """Elements of updated weights gathered in one collective; clamped (stages 1 and 2)."""

    overlap_comm: bool | None = None
    """Overlap gradient reduction with backward; null means yes (stages 0 to 2)."""

    ignore_unused_parameters: bool = True
    """``false``: a trainable parameter without a gradient is an error that names it."""

    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Storage of optimizer states."""

    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Storage of parameters (stage 3)."""

    stage3_gather_16bit_weights_on_model_save: bool = False
    """Allow ``engine.save_16bit_model()``, which gathers the full model on rank 0; ``false`` makes
    it an error. ``engine.export()`` is always allowed (stage 3)."""

    contiguous_gradients: bool = hint(True, "gradients are always reduced in flat pieces of memory")
    """Copy gradients into one buffer as they are produced."""

    reduce_scatter: bool = True
    """``false``: gradients are all-reduced and a rank keeps its shard, which doubles the elements
    that each reduction moves (stages 1 and 2)."""

    allgather_partitions: bool = hint(
        True, "updated weights are always all-gathered, never broadcast one by one"
    )
    """All-gather updated weights instead of broadcasting them."""

    round_robin_gradients: bool = hint(
        False,
        "every rank has an equal part of each bucket, so that copies are spread",
    )
    """Spread gradient copies over the ranks."""

    sub_group_size: PositiveInt | None = None
    """Maximum number of elements that a rank updates at once, which bounds the memory for states in
    files; null means the elements of a block. LAMB, Muon and custom optimizers always update
    complete parameters (stage 3; at the others ``reduce_bucket_size`` is the limit)."""

    use_multi_rank_bucket_allreduce: bool = hint(
        True, "a bucket is always reduced for all ranks in one collective"
    )
    """Join the buckets of several ranks."""

    compute_grad_norm: bool = hint(
        True, "the norm is always computed: it is reported and shows an overflow"
    )
    """Compute the global gradient norm."""

    load_from_fp32_weights: bool = hint(
        True, "checkpoints hold the fp32 master weights, and they are loaded"
    )
    """Load master weights rather than 16-bit ones."""

    elastic_checkpoint: bool = hint(False, "every checkpoint loads at any stage and world size")
    """Checkpoints for another world size."""

    parameter_alignment: bool = hint(False, "flat buffers are laid out by the engine")
    """Pad between parameters of a flat buffer."""

    mics_shard_size: Shards = -1
    """Number of adjacent ranks over which the states are sharded; other ranks are replicas, which
    average gradients once in a step. It must divide the data-parallel size; -1 or 0: all ranks
    (stages 1 to 3)."""

    stage3_prefetch_bucket_size: NonNegativeInt | None = None
    """Elements to prefetch, in complete blocks: the next block, and more while they fit; 0 turns
    prefetching off; null means one block ahead in backward (stage 3)."""

    stage3_param_persistence_threshold: NonNegativeInt | None = None
    """Parameters with fewer elements are not sharded: each rank keeps them whole; null means 0,
    that is none, and 100,000 for ``deepspeed.initialize`` (stage 3)."""

    stage3_model_persistence_threshold: NonNegativeInt = 2**63 - 1
    """Most elements of all these parameters together; the first ones in the model count
    (stage 3)."""

    stage3_max_live_parameters: NonNegativeInt | None = None
    """Elements that may stay gathered from forward to backward, starting with the last blocks; null
    means 1e9 if ``stage3_max_reuse_distance`` is set, else 0 (stage 3)."""

    stage3_max_reuse_distance: NonNegativeInt | None = None
    """Maximum number of elements used between the forward and the backward of a block that stays
    gathered; null means 1e9 if ``stage3_max_live_parameters`` is set (stage 3)."""

    stage3_module_granularity_threshold: NonNegativeInt = hint(0, _BY_BLOCK)
    """Modules finer than this are gathered in one collective."""

    stage3_use_all_reduce_for_fetch_params: bool = hint(False, _BY_BLOCK)
    """Fetch parameters by all-reduce."""

    stage3_allgather_sequential: bool = hint(False, _BY_BLOCK)
    """Gather parameters one by one."""

    memory_efficient_linear: bool = hint(
        True, "autograd does not keep gathered weights of linear layers"
    )
    """A linear layer that saves no weights."""

    pipeline_loading_checkpoint: bool = hint(False, "a rank always reads only its own shards")
    """Load a checkpoint piece by piece."""

    override_module_apply: bool = hint(True, "models are initialised before they are sharded")
    """Gather parameters inside ``Module.apply``."""

    log_trace_cache_warnings: bool = hint(False, "there is no trace cache")
    """Warn when the trace of modules changes."""

    enable_sanity_checks: bool = hint(False, "the engine's checks are always on")
    """Check more while training."""

    save_muon_momentum_buffer_in_memory: bool = hint(
        False, "Muon's states are kept where offload_optimizer says"
    )
    """Keep Muon's momentum in memory."""

    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Modules that stage 3 gathers in one collective."""

    @property
    def shard_ranks(self) -> int | None:
        """Return the ranks over which states are sharded; None for all data-parallel ranks."""
        return self.mics_shard_size if self.mics_shard_size > 0 else None
