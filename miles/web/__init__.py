"""What every service of Miles shares: who may call it, and where it listens."""
