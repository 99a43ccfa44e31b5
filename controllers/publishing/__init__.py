"""Publishing of new weights: from the actor's ranks to every rollout replica.

A publication is one weight sync, with the verification that it arrived.
"""
