"""Checkpoints: sharded states that all ranks write, and the store that commits them."""
