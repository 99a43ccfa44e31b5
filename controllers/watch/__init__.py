"""Metrics of a run, and the limits on them that stop it.

It may import `compose`, what lies below it, and `workers` and `verl_ray`.
"""
