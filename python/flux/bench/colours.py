"""The colours of all pictures of results."""

FLUX = "#e4572e"
PEERS = ["#3d5a80", "#7a9cc6", "#98c1d9", "#b9c0c9"]
INK = "#22303c"
FAINT = "#6b7785"
LOSS = "#9aa3ad"
GRID = "#e7eaee"
EDGE = "#c9cfd6"
