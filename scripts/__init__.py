"""Programs of a checkout, which the installed package does not hold.

Tests import them, and nothing of the product does. They may import the whole product
and no test; `bench/gpu.py` runs some tests, each as a program of its own.
"""
