"""Roles: one class each over the engine contracts, one Ray process per rank.

They may import `verl_ray`, and no driver.
"""
