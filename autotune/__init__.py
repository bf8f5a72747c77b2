"""Record a training step, predict candidates, search among them and show the search."""
