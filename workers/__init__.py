"""Roles: one class each over the engine contracts, one Ray process per rank.

They know no driver.
"""
