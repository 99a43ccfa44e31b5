"""From a root config and overrides to the typed configuration; only here is Hydra known."""
