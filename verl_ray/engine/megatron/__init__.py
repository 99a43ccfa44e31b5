"""The `megatron` backend: megatron-core's layers, schedules and distributed optimizer behind the engines' contract."""
