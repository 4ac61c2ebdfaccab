"""What the blocks of a transformer keep from forward to backward.

The paper's arithmetic, for blocks of layer norm, attention and a feed-forward layer of four times
the width, with three dropouts. In multiples of s b h, the elements of the activation between two
blocks, one block keeps in 16 bits:

==========================================  =======================  ===========================
kept                                        whole on every rank      divided by the tensor ranks
==========================================  =======================  ===========================
inputs of both layer norms                  4
inputs of attention and feed-forward        4
masks of the two dropouts after them        2
queries, keys, values, input of projection                           8
inputs of the non-linearity and after it                             16
scores: softmax, its dropout and its mask                            5 a s / h
==========================================  =======================  ===========================

which is s b h (10 + 24/t + 5 a s / (h t)); with sequence parallelism all of it is divided by t.
Scores are kept by attention that is written out, and not by torch's
``scaled_dot_product_attention``. With activation checkpointing a block keeps its input, 2 s b h,
and one block at a time is as large as above.

References:
    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
    arXiv:2205.05198, section 4: equations 1 to 5, table 2.
"""

from __future__ import annotations

__all__ = ["block_activations", "kept_activations"]

_MASKS = 2
"""Of the part that is whole on every rank: one byte, whatever the precision."""


def block_activations(
    activation: int,
    *,
    width: int = 2,
    tensor: int = 1,
    sequence_parallel: bool = False,
    scores: float = 0.0,
) -> int:
    """Bytes that one block keeps of one micro-batch.

    Args:
        activation: s b h, elements between two blocks.
        width: Bytes of an element.
        tensor: t, ranks that matrices are cut over.
        sequence_parallel: Whether norms and dropouts are cut along the tokens.
        scores: a s / h, where attention keeps its scores; 0 where it does not.
    """
    whole = 4 * width + _MASKS
    cut = 12 * width + scores * (2 * width + 1)
    shared = tensor if sequence_parallel else 1
    return round(activation * (whole / shared + cut / tensor))


def kept_activations(
    activation: int,
    blocks: int,
    *,
    in_flight: int = 1,
    width: int = 2,
    tensor: int = 1,
    sequence_parallel: bool = False,
    scores: float = 0.0,
    checkpointing: bool = False,
    interval: int = 1,
    partitioned: bool = False,
    on_host: bool = False,
    received: bool = False,
) -> int:
    """Bytes of the device that the blocks of one rank keep at most.

    Embedding, head and loss are not counted.

    Args:
        activation: s b h of one micro-batch.
        blocks: Of this rank.
        in_flight: Micro-batches whose backward is still to come: 1F1B has as many as there are
            stages, at most all, on the first of them; without a pipeline it is 1.
        width: Bytes of an element.
        tensor: t, ranks that matrices are cut over.
        sequence_parallel: Whether norms and dropouts are cut along the tokens.
        scores: a s / h, where attention keeps its scores.
        checkpointing: Whether blocks keep their input alone and are computed again.
        interval: Blocks that are computed again together, where so.
        partitioned: Whether tensor ranks share those inputs (``partition_activations``).
        on_host: Whether the inputs wait in host memory (``cpu_checkpointing``).
        received: Whether the first input of all stays as it is, as what a pipeline stage gets does.
    """
    one = block_activations(
        activation,
        width=width,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        scores=scores,
    )
    if not checkpointing:
        return in_flight * blocks * one
    divided = tensor if partitioned or sequence_parallel else 1
    again = max(min(interval, blocks), 1)
    staying = in_flight if received and not sequence_parallel else 0
    kept = in_flight * -(-blocks // again) - staying
    inputs = 0 if on_host else kept * width * activation // divided
    return inputs + staying * width * activation + again * one
