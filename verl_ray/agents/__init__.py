"""Episodes: a policy's talks with worlds and tools, and the rows that it learns from.

It may import `rewards`, and what lies below it.
"""
