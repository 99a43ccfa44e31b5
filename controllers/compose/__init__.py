"""Composition of root configs and overrides to the typed configuration.

Invariant: no other package knows Hydra.
"""
