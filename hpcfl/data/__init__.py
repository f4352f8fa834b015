"""Where samples come from (sources), which client gets which (partitions), what a rank keeps (shard)."""
