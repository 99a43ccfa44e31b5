"""What a run measures of itself, and when it stops because of it."""
