"""The Python calls of `verl_ray`: the commands, in a process of somebody else.

Invariant: a call makes what the command of the same name makes.

It may import `commands`, what lies below it, and `workers` and `verl_ray`.
"""
