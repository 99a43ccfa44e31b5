"""Child processes that run users' code, and what is lost with one that ends.

Everything here is used by several rooms.

It may import `user_files`, and no framework.
"""
