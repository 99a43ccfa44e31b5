"""Checkpoints: sharded states that all ranks write, and the store that commits them.

It may import `rewards` and `models`, and what lies below them.
"""
