"""The driver: the order of a step, recovery, and the command line.

It may import `workers` and `verl_ray`; its parts have an order of their own.
"""
