"""Simulate personalised federated learning on HPC machines with MPI and PyTorch."""

__version__ = "0.1.0"
