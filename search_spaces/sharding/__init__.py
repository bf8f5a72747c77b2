"""Techniques that divide states, their communication and the compute itself over ranks."""
