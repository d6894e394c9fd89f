"""What all measurements share: intervals of figures, files that resume, and reports."""
