"""Moving one policy version from a training group to rollout replicas: what, how much at once, and by which wire."""
