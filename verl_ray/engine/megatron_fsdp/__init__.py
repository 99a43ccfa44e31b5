"""The `megatron_fsdp` backend: NVIDIA's package megatron-fsdp behind the contract of
engines.
"""
