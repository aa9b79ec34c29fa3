"""Collects finished groups: episodes, rewards, filters, leases, and the held-out evaluation. Imports no torch."""
