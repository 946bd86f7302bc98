"""How long an engine's iterations take."""
