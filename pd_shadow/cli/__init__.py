"""The `pd-shadow` command."""
