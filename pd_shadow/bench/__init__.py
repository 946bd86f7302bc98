"""Benchmarks: the cost and the yield of shadow work on real engines, and what moving KV costs, from outside."""
