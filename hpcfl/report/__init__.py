"""report.html: what runs gave, as one self-contained page."""
