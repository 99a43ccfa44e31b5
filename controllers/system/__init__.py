"""The processes of a run, and the roles in them.

It may import `rollouts`, what lies below it, and `workers` and `verl_ray`.
"""
