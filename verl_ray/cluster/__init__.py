"""The cluster layer: one driver, its worker processes on Ray, and typed calls.

It may import `tracking`, `agents` and `checkpoint`, and what lies below them.
"""
