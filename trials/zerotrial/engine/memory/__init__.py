"""How many bytes a rank needs, before it is started; and what it frees stays with it.

P parameters in 16 bits with Adam on N ranks, bytes for each parameter and rank:

======  ==============  =============  ==============  =========  ==========  ==============
stage   parameters      gradients      master          moments    together    accumulation
======  ==============  =============  ==============  =========  ==========  ==============
0       2               2              4               8          16          2
1       2               2              4/N             8/N        4 + 12/N    2
2       2               2/N            4/N             8/N        2 + 14/N    2/N
3       (the master)    4/N            4/N             8/N        16/N        none
======  ==============  =============  ==============  =========  ==========  ==============

Stage 3 keeps no 16-bit shard: it casts its fp32 shard while it gathers, and its gradients are
fp32, so that the sum is the same. *Accumulation* comes on top where 16-bit gradients are summed in
fp32. A gradient of 16 bits lives only until it is added, so that this costs 2 bytes and not 4.

In fp32 the parameters are their own master, and so are the shards of stage 3. Offloading does not
move them: on a GPU the optimizer works on a copy of them elsewhere; on a CPU it works on them where
they are, and only the moments go to files. Optimizers that look at whole parameters (LAMB, Muon)
have a copy at stage 3 in any case, see :mod:`zerotrial.engine.stage3.update`.

Beside these model states a rank needs room that the formula does not name, the *working set*:
buckets under way, at stage 3 the blocks that are gathered at the moment, and in the host's memory
what is under way between the device, host and files. Activations depend on the batch, and are
counted apart, for transformers: :mod:`zerotrial.engine.memory.activations`.

Two files count, since the two are known in different ways: :mod:`zerotrial.engine.memory.states` is
the paper's arithmetic on the number of parameters, :mod:`zerotrial.engine.memory.working` follows
what the stages do, and changes with them.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
    arXiv:1910.02054, sections 3 and 5.
"""

from zerotrial.engine.memory.activations import block_activations, kept_activations
from zerotrial.engine.memory.asked import (
    DEFAULT_BUCKET_NUMEL,
    MOMENTS,
    WHOLE,
    Device,
    DTypeName,
    Place,
)
from zerotrial.engine.memory.states import MemoryEstimate, estimate, every_choice

__all__ = [
    "DEFAULT_BUCKET_NUMEL",
    "MOMENTS",
    "WHOLE",
    "DTypeName",
    "Device",
    "MemoryEstimate",
    "Place",
    "block_activations",
    "estimate",
    "every_choice",
    "kept_activations",
]
