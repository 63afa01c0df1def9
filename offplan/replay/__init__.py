"""Replay a plan: insert its transfers into the graphs of a real step, and run them."""
