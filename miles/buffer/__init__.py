"""The experience buffer: every group and every step's list of groups, durable, in the run directory."""
