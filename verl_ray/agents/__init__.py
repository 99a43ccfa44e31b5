"""Episodes: a policy's talks with worlds and tools, and the rows that it learns from.

It may import `rewards` and `models`, and what lies below them.
"""
