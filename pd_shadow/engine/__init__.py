"""Engine adapters, one folder per engine; here, what they share: settings, tags, shadow legs, the Attach stream."""
