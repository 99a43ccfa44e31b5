"""A run from its beginning or its checkpoint to its end: the loop around every step, recovery, stops."""
