"""`python -m provisioning`."""

from provisioning.cli import main

main()
