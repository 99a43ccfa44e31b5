"""Typed configuration, importable in milliseconds: neither torch nor ray nor vllm nor hydra."""
