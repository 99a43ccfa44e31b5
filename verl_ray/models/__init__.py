"""Models of Hugging Face: their computation, and reading and writing them.

It may import `data`, and what lies below it.
"""
