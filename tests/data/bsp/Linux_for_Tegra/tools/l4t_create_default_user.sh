#!/bin/sh
# Stand-in: makes an account, and says more than it should, so that a test sees what the log keeps.
echo "called with $*"
if grep -q "^$2:" rootfs/etc/passwd; then
  echo "ERROR user $2 already exists"
  exit 1
fi
echo "$2:x:1000:1000::/home/$2:/bin/bash" >> rootfs/etc/passwd
echo "$4" > password-given
