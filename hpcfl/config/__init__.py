"""The configuration of a run: YAML and key=value in, one validated, frozen object out."""
