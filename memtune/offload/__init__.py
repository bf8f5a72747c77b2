"""Wing 3: parameters, gradients and optimizer state on the host or SSD."""
