"""The operators with fp8 operands: the same rows, checked with scales in their data, timed beside bf16."""
