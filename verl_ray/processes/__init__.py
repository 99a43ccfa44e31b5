"""Child processes that run users' code, and what is lost with one that ends.

Everything here is used by several rooms. It imports none of them.
"""
