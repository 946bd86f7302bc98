"""The OpenAI-compatible data path: places calls, runs their two legs, and shadow legs as directed."""
