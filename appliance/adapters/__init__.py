"""Thin translators, one outside thing each."""
