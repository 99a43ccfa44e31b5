"""Composition of root configs and overrides to the typed configuration.

Invariant: no other package knows Hydra.

It may import `tasks`, what lies below it, and `workers` and `verl_ray`.
"""
