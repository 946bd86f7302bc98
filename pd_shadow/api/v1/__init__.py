"""Version 1 of the wire contract: generated, never edited."""
