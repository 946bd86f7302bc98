"""Generated from protos/ by tools/generate_api.py."""
