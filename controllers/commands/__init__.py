"""The commands of `verl-ray`, one file each.

Invariant: a command takes a checked configuration, or flags of its own, and returns an
exit code.
"""
