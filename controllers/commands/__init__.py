"""The commands of `verl-ray`, one file each.

Invariant: a command takes a checked configuration, or flags of its own, and returns an
exit code.

It may import `run`, what lies below it, and `workers` and `verl_ray`.
"""
