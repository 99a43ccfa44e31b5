"""The processes of a run, and the roles in them."""
