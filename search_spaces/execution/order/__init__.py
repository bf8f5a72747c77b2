"""The order in which ops run."""
