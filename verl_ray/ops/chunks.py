"""The number of logits that exist at once.

Both the computation of log-probs and the memory plan follow these numbers.

Invariant: numbers alone, so that they can be read without torch.
"""

from __future__ import annotations

CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}
"""Logits of one chunk, by device type.

CPU: 16 MiB in float32 stay in the last-level cache. Smaller chunks made the head's
products slower, larger ones the softmax, by up to 2 times each. GPU: 1 GiB, enough
tokens to fill its products.
"""

KEPT_LOGITS = 2**26
"""Up to this many logits (256 MiB in float32) are kept for the backward pass.

More are recomputed chunk by chunk. Recomputing repeats the head's product, a third more
work in the head, which only pays where memory is the limit.
"""
