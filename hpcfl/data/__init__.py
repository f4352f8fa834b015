"""Data: sources of samples, partitions (which client gets which samples), and a rank's shard."""
