"""The controller's decisions: plain, synchronous, deterministic; time comes in, effects go out as data."""
