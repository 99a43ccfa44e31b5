"""The GPUs that trainers and rollout engines share."""
