"""What `hpcfl doctor` checks before hours are spent: ranks, messages, the run folder, data."""
