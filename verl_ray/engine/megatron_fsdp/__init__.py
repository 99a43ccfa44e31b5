"""The `megatron_fsdp` backend: NVIDIA's package megatron-fsdp behind the contract of
engines.

It may import the modules of `engine` that name no backend, and what lies below them.
"""
