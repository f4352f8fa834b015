"""Results: what a run left in its folder, read without disturbing it."""
