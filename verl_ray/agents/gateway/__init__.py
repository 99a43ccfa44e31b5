"""HTTP for agents that are programs of their own: each turn of theirs is the policy's.

An episode of such an agent has a session here, with a secret that its requests carry. A
request in one of three protocols becomes a `ModelCall`, the session lets the policy
answer it, and the protocol writes the answer.
"""
