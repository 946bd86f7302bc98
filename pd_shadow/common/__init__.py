"""What every process shares: strict configuration, structured logs, reason labels."""
