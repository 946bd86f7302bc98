"""Engine adapters, one folder per engine."""
