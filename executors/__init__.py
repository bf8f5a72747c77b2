"""Ways to run a trial in fresh processes: on this machine, on a Ray cluster, or computed instead of run."""
