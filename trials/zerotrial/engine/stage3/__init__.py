"""Stage 3: parameters sharded by ``fully_shard``, gathered block by block."""
