"""Trained drafters and draft models as other engines want them: directories and launch lines."""
