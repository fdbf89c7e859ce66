"""The ways an operator runs: kernels, parts, torch, nodes, protocols on CPUs. No way imports an operator."""
