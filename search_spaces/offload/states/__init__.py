"""Where parameters, gradients and optimizer state live and where they are updated: device bytes for link and
host time.
"""
