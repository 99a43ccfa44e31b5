"""Rollout engines: token ids in, sampled tokens with their log-probs and policy version out."""
