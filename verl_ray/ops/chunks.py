"""How many logits exist at once: what `log_probs` computes by, and what the memory plan counts.

Invariant: numbers alone, so that they can be read without torch. Deliberately not here: the computation.
"""

from __future__ import annotations

CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}
"""Logits of one chunk, by device type. CPU: 16 MiB in float32 stays in the last-level cache (smaller chunks made the
head's products slow, larger ones the softmax, by up to 2 times each). GPU: 1 GiB, enough tokens to fill its products.
"""

KEPT_LOGITS = 2**26
"""Up to this many logits (256 MiB in float32) are kept for the backward pass; more are recomputed chunk by chunk.
Recomputing repeats the head's product, a third more work in the head, which only pays where memory is the limit."""
