"""The demo: a whole two-model cluster on loopback, the same agent sessions cold and with shadow prefill."""
