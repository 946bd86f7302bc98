"""The commands of `pd-shadow admin`, a file a noun."""
