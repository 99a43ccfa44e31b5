"""Rewards: grading a response with Python functions, in processes that can be killed. Needs neither torch nor ray."""
