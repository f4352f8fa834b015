"""What `hpcfl doctor` looks at before hours are spent: ranks, collectives, the run folder, data."""
