"""The values of every configuration, as YAML; a package only so that Hydra finds it by
name (`pkg://configs`).
"""
