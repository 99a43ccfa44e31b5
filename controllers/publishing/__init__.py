"""New weights from the actor's ranks into every rollout replica, as one verified transaction."""
