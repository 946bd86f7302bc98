"""How bytes move between instances: one interface, NIXL behind it, and a decorator that makes it fail."""
