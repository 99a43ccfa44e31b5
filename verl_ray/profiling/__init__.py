"""Where a step's time, memory and arithmetic go."""
