"""The work behind `verl_ray.api`: the commands, called in a process of somebody else.

Invariant: a call makes what the command of the same name makes.
"""
