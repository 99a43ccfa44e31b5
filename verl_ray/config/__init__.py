"""Typed configuration, which imports in milliseconds.

Invariant: no module here imports torch, ray, vllm or hydra.
"""
