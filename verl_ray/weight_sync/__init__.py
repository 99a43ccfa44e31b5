"""Weight sync: one policy version from a training group to rollout replicas.

The parts are what travels, and how much at once (`manifest.py`), and over which wire
(`transport.py` and the wires behind it).

It may import `config`, and what lies below it.
"""

SLOTS = 2
"""Most buckets under way at the same time: one is filled while the other is read."""
