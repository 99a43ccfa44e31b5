"""One run from its beginning or checkpoint to its end.

The loop around every step, recovery, stops and the warm start are here.

It may import `trainers`, what lies below it, and `workers` and `verl_ray`.
"""
