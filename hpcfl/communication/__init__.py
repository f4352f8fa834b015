"""Ranks and collectives, and the messages that travel between server and clients."""
