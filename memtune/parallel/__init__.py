"""Wing 2: the model over several ranks."""
