"""A run from its beginning or checkpoint to its end: the loop around every step, recovery, stops, the warm start."""
