"""Routes of searches: where their trials stand, what they tell together, what one would cost."""
