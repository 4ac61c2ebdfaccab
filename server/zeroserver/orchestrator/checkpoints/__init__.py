"""Which checkpoints stay, and how others go: by the policy, or because a user says so."""
