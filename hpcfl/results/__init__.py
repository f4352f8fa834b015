"""Results: read a run's folder, also while the run is running."""
