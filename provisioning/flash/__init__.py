"""Flashing Jetson Orin boards: NVIDIA's own tools do it, planned, watched and judged here.

- `boards`: modules, boards and their names; what hangs on USB, read from sysfs
- `facts`: what the BSP folder and this host are
- `plan`: pure; a wish and facts -> the exact commands
- `checks`: pure; what stands against them
- `failures`: pure; what a tool left behind -> what it means, and what helps
- `run`: performs a plan: lock, logs, boards in parallel, going on after an interruption
- `tool`: one command of theirs, run to its end
- `rootfs`: takes back what the overlay of an earlier run has brought
- `exports`: takes back what a run has exported over NFS, also when the run was killed
- `home`: a board counts when it has called home: the ticket, the listener, the verdict
- `inventory`: the signed file of what was flashed
"""
