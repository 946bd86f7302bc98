"""KV movement: chunk plans, link gate, transfer ledger."""
