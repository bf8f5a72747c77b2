"""Where saved activations wait for backward: device bytes for traffic on the link."""
