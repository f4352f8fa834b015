"""The round loop, and what it needs to start, watch and stop."""
