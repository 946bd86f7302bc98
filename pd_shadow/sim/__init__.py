"""A discrete-event simulation of clusters under normal traffic and routed agent sessions."""
