"""In which order ops run."""
