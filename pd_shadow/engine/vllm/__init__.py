"""Adapters to an unmodified vLLM."""
