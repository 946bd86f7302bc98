"""Seeded fault schedules against the whole control plane, in virtual time.

The controllers are real cores; gateways, engines and the network between them are scripted. Everything follows from the
seed. Run `python -m tests.controller.campaign --seeds 0:10000`, or one schedule, told step by step, with
`--seed N -v`.
"""
