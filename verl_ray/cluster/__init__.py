"""The cluster layer: one driver, its worker processes on Ray, and typed calls."""
