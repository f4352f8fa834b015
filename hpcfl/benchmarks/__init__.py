"""What the product costs, as ratios measured in one process or one run."""
