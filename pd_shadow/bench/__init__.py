"""Benchmarks on real engines: the cost and the yield of shadow work, measured from outside."""
