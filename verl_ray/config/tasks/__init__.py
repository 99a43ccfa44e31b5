"""The configuration types of the project's own tasks, one file each.

They are apart from the trainers so that `verl-ray check` does not import these.
"""
