"""report.html: results of runs as one self-contained page."""
