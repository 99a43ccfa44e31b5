"""Programs of a checkout, which the installed package does not hold.

Tests import them; nothing of the product does, and they import no test.
"""
