"""Groups whose ranks are on several nodes: topology, rails, and their workspace. Only registry.py imports it,
and what needs a NodesWorkspace.
"""
