"""From what ``initialize`` is given to what an engine is made of."""
