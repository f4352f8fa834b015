"""What a run will take, from a dry run of a few of its rounds."""
