"""The benchmark behind `appliance bench`: a client that measures a running daemon, and says what passes."""
