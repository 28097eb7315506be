"""Decisions, pure: given `now`, facts and events, they return values. No clock, file, thread or log."""
