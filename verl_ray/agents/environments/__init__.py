"""The environments that ship: small ones, each of which shows a feature of episodes.

Invariant: an episode depends on its task and its seed alone, and not on what else runs
in the process. Needs neither torch, ray nor vllm.

It may import `agents/contract.py`, and what lies below `agents`.
"""
