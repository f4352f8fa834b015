"""What a run leaves on disk: its folder and lock, checkpoints, and figures round by round."""
