"""Checkpoints: sharded states written by all ranks, and the store that makes them count."""
