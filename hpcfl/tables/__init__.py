"""Tables: whole comparisons from one file, their runs, figures and statistics."""
