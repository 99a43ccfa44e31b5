"""Who holds the devices that trainers and rollout engines share."""
