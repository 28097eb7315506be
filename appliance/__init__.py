"""The daemon: serves bundles over HTTP and MQTT and keeps them running."""

__version__ = "0.1.0"
