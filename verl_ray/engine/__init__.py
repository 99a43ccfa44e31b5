"""Training engines: one contract, interchangeable backends.

It may import `checkpoint`, and what lies below it.
"""
