"""Typed configuration, which imports in milliseconds.

Invariant: no module here imports torch, ray, vllm or hydra.

It may import `algorithms`, `backends` and `parallel`, and what lies below them.
"""
