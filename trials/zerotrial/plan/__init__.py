"""What a trial needs before it is started: bytes a rank, at each stage and offload."""
