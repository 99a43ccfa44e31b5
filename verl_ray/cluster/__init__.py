"""The cluster layer: one driver, its worker processes on Ray, and typed calls.

It may import `checkpoint`, and what lies below it.
"""
