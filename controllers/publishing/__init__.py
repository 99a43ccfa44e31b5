"""Publishing of policy versions: a weight sync from the actor to rollout replicas.

It may import `devices`, what lies below it, and `workers` and `verl_ray`.
"""
