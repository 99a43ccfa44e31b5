"""Publishing of policy versions: a weight sync from the actor to rollout replicas."""
