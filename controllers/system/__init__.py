"""Which processes a run has, and the roles in them."""
