"""Measures the transfer path of this machine: two processes, real transports, and the machine's own limits beside."""
