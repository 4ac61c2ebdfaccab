"""Contents of the replacement's modules; scripts see the names in ``__all__``."""
