"""What is cut over the ranks: states (parameters, gradients, optimizer), how they are communicated, and the
compute itself.
"""
