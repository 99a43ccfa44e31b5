"""What a run would need, of the configuration, the models' files and the machine, before anything starts."""
