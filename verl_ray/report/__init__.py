"""The report of a run: one HTML file that makes no request.

Invariant: it is made from the run's folder alone, also while the run goes on or after a
crash, and neither ray nor torch nor vllm is imported for it.

It may import `tracking`, `agents` and `checkpoint`, and what lies below them.
"""
