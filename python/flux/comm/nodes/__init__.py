"""Groups whose ranks are on several nodes: rails, and their workspace."""
