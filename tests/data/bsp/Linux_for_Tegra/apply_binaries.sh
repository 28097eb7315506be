#!/bin/sh
# Stand-in: NVIDIA's drivers come into the root file system.
echo '# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025' \
  > rootfs/etc/nv_tegra_release
