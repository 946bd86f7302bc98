"""What a simulated cluster is asked: normal requests and routed agent sessions, generated or read from traces."""
