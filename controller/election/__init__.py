"""Which of several controllers leads."""
