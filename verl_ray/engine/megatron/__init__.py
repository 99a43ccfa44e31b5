"""The `megatron` backend: megatron-core's layers, schedules and distributed optimizer behind the engines' contract."""

import warnings

# What it says at every start, of kernels that are not used here and of torch's functions that will be renamed.
for _words in (
    "(Transformer Engine and )?Apex (is|are) not installed", "Transformer Engine and Apex are not installed",
    "full scope is deprecated", "When using (async grad allreduce|sequence parallelism) it is recommended",
    "The .grad attribute of a Tensor that is not a leaf", "`torch.distributed.", "`sequence_parallel` is set to `True`",
):  # fmt: skip
    warnings.filterwarnings("ignore", message=_words)
