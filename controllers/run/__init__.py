"""One run from its beginning or checkpoint to its end.

The loop around every step, recovery, stops and the warm start are here.
"""
