"""Trainers: the content of one step, by task.

The tasks are reinforcement learning, supervised fine-tuning and reward models.

It may import `system`, what lies below it, and `workers` and `verl_ray`.
"""
