"""A package of DeepSpeed's that has modules only."""

__all__: list[str] = []
