"""The control plane: which instance, which shadow job, in which order."""
