"""What the journey tests start and ask: real daemons, a real broker, tiny real models."""
