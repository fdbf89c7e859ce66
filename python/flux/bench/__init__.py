"""The benchmark behind ``flux bench``: suites, timing protocol, peers, tables, result files, pictures.

docs/benchmarks.md says how to read a result and which traps the protocol avoids.
"""
