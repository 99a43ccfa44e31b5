"""The `megatron` backend: megatron-core's layers, schedules and distributed optimizer
behind the contract of engines.

It may import the modules of `engine` that name no backend, and what lies below them.
"""

import warnings

# Warnings of every start: about kernels that are not used here, and about functions of
# torch that will be renamed.
_EXPECTED_WARNINGS = (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",
    "When using (async grad allreduce|sequence parallelism) it is recommended",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.",
    "`sequence_parallel` is set to `True`",
)
for _message in _EXPECTED_WARNINGS:
    warnings.filterwarnings("ignore", message=_message)
