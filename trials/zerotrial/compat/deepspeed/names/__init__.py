"""What each module of the stand-in has; ``__all__`` is what scripts see of it."""
