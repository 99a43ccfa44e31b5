"""Plans for machines that one does not sit on: estimated times, and a search."""
