"""The configurations of the tasks that `verl-ray check` reads without importing a trainer, one file each."""
