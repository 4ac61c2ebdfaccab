"""Formulas of docs/concepts/scaling.md: traffic, pipeline bubble and activation memory.

Elements are counted as in the ZeRO paper: a reduce-scatter or an all-gather of E counts E, an
all-reduce 2 E. Tests compare the traffic with the counters of real runs.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7 (data axis).
    Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3 (tensor axis).
    Narayanan et al., Efficient Large-Scale Training on GPU Clusters, arXiv:2104.04473, section 2.2
    (pipe axis, bubble).
    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
    arXiv:2205.05198, section 4: equations 1 to 5, table 2 (activations).
"""


def data_traffic(
    parameters: int,
    stage: int,
    micro_batches: int,
    ranks: int,
    *,
    shard: int | None = None,
    frozen: int = 0,
    to_backward: int = 0,
    replicated: int = 0,
) -> int:
    """Count the elements that one rank moves along the data axis in a step.

    Args:
        parameters: Trainable parameters of the rank, P.
        stage: ZeRO stage.
        micro_batches: Micro-batches of a step.
        ranks: Ranks along the axis.
        shard: Ranks that divide the states; None: all.
        frozen: Stage 3: frozen elements, gathered and never reduced.
        to_backward: Stage 3: elements that stay gathered from forward to backward.
        replicated: Stage 3: trainable elements of small parameters, gathered once a step.
    """
    if ranks == 1:
        return 0
    if stage == 0:
        return 2 * parameters
    shard = shard or ranks
    # Replicas of a shard all-reduce it once.
    between = 0 if shard == ranks else 2 * -(-parameters // shard)
    if shard == 1:
        return between
    if stage == 1:
        return 2 * parameters + between  # gradients once, and weights
    if stage == 2:
        return (micro_batches + 1) * parameters + between
    freed = parameters + frozen - to_backward - replicated
    gathered = micro_batches * (2 * freed + to_backward) + replicated
    return gathered + micro_batches * parameters + between


def tensor_traffic(
    activation: int, blocks: int, micro_batches: int, ranks: int, *, ends: int = 2, logits: int = 0
) -> int:
    """Count the elements that one rank moves along the tensor axis in a step.

    Args:
        activation: Elements of a micro-batch's activation between two blocks.
        blocks: Blocks of the rank; each sums an activation twice forward and twice backward.
        micro_batches: Micro-batches of a step.
        ranks: Ranks along the axis.
        ends: How many of embedding and head are divided on this rank: 0, 1 or 2 more sums.
        logits: Elements of the head's output, where it is gathered.
    """
    if ranks == 1:
        return 0
    return micro_batches * (2 * activation * (4 * blocks + ends) + logits)


def pipe_traffic(activation: int, micro_batches: int, stages: int, chunks: int = 1) -> int:
    """Count the elements that a rank sends along the pipe axis in a step.

    Of the rank that sends most: one between two others. Of two stages, each is at an end and sends
    no activations of its last chunk, or no gradients of its first.
    """
    if stages == 1:
        return 0
    return (2 * chunks - (stages == 2)) * micro_batches * activation


def bubble(micro_batches: int, stages: int) -> float:
    """Return the share of a step in which a rank waits: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def block_activations(
    activation: int,
    *,
    width: int = 2,
    tensor: int = 1,
    sequence_parallel: bool = False,
    scores: float = 0.0,
) -> int:
    """Count the bytes that one transformer block keeps of one micro-batch until backward.

    In 16 bits: s b h (10 + 24 / t + 5 a s / (h t)). The first term is replicated on the tensor
    ranks unless they divide the sequence.

    Args:
        activation: s b h, elements between two blocks.
        width: Bytes of an element.
        tensor: t, tensor-parallel ranks.
        sequence_parallel: Whether norms and dropouts are divided along the sequence.
        scores: a s / h, where attention keeps its scores; 0 where it does not.
    """
    replicated = 4 * width + 2  # inputs of two norms and two layers, and two masks of one byte
    divided = 12 * width + scores * (2 * width + 1)
    shared = tensor if sequence_parallel else 1
    return round(activation * (replicated / shared + divided / tensor))


def kept_activations(
    activation: int,
    blocks: int,
    *,
    in_flight: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    scores: float = 0.0,
    checkpointing: bool = False,
    partitioned: bool = False,
) -> int:
    """Count the bytes in 16 bits that the blocks of one rank keep at most.

    Args:
        activation: s b h of one micro-batch.
        blocks: Blocks of the rank.
        in_flight: Micro-batches whose backward has not run: with 1F1B the number of stages, at
            most all, on the first stage.
        tensor: See :func:`block_activations`.
        sequence_parallel: See :func:`block_activations`.
        scores: See :func:`block_activations`.
        checkpointing: Whether each block keeps only its input and is computed again.
        partitioned: Whether tensor ranks divide those inputs.
    """
    block = block_activations(
        activation, tensor=tensor, sequence_parallel=sequence_parallel, scores=scores
    )
    if not checkpointing:
        return in_flight * blocks * block
    divided = tensor if partitioned or sequence_parallel else 1
    return in_flight * blocks * 2 * activation // divided + block
