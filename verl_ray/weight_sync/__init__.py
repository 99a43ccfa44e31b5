"""Moving one policy version from a training group to rollout replicas: what (engine), how much (buckets), by which wire."""
