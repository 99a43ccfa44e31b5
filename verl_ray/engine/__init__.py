"""Training engines: one contract, interchangeable backends.

It may import `tracking`, `agents` and `checkpoint`, and what lies below them.
"""
