"""Routes of searches: where their trials stand, and what one would cost."""
