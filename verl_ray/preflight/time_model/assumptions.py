"""The assumptions of the time model, each with its source.

Invariant: no figure here was measured by this project. A figure is a maker's, a
publication's, or assumed. The peaks of GPUs are elsewhere
(`verl_ray/preflight/machine.py`).
"""

from __future__ import annotations

GB = 10**9

TRAINING_EFFICIENCY = 0.4
"""Share of the peak FLOPs that a forward or backward pass reaches.

Llama 3 reports 38 to 43 % in bfloat16 on 8,192 and more H100 (arXiv:2407.21783, table
4), with kernels of its own. Plain PyTorch may reach less.
"""

PREFILL_EFFICIENCY = 0.4
"""Share of the peak FLOPs at which engines read prompts. Assumed."""

DECODE_BANDWIDTH_SHARE = 0.5
"""Share of a GPU's memory bandwidth that decoding and the optimizer reach. Assumed."""

NETWORK_SHARE = 0.7
"""Share of a link's peak that collectives, and copies over PCIe, reach. Assumed."""

FLOAT32_SLOWDOWN = 16
"""Times that matrix products take in float32, without TF32, in comparison to bfloat16.

The data sheet of the A100 has 19.5 and 312 TFLOP/s.
"""

DECODE_STEP_S = 0.004
"""Time of an engine's step besides the model: scheduling, sampling. Assumed."""

LAYER_LAUNCH_S = 0.0004
"""Least time of a pass through a layer: the launches of its kernels, one by one.
Assumed."""

EXCHANGE_LATENCY_S = 20e-6
"""Least time of an exchange between tensor-parallel ranks. Assumed."""

MEAN_LENGTH_SHARE = 0.5
"""Mean length of prompts and responses, as a share of the longest. Assumed: lengths of
responses are spread evenly from 0 to the longest."""

HOST_MEMORY_BYTES_PER_S = 200 * GB
"""Memory of a node that all of its processes read and write together. Assumed."""

PROCESS_COPY_BYTES_PER_S = 5 * GB
"""Memory of the host that one process copies, verified by a fingerprint. Assumed."""

HOST_BROADCAST_BYTES_PER_S = 2 * GB
"""Bytes that a broadcast between hosts delivers over gloo. Assumed."""

DISK_BYTES_PER_S = 1 * GB
"""Bytes that a folder takes or gives which all nodes see. Assumed."""
