#!/bin/busybox sh
# First program of the guest: loads modules, puts the host's files (read-only, changes go to
# memory) where they are on the host, and hands over to /run/lab/start, which the host wrote.
fail() {
    echo "laxity-init: $*" >/dev/console
    busybox printf '\54' | busybox dd of=/dev/port bs=1 seek=244 2>/dev/null
    busybox poweroff -f
}
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
while read -r module; do
    busybox insmod "/modules/$module" || fail "insmod $module"
done </modules/order
P=trans=virtio,version=9p2000.L,msize=512000
busybox mount -t 9p -o $P,ro,cache=loose hostroot /lower || fail "no host files"
busybox mount -t tmpfs -o mode=0755 upper /upper
busybox mkdir /upper/files /upper/work /upper/root
R=/upper/root
busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay $R || fail "no overlay"
for folder in dev proc sys run tmp; do busybox mkdir -p $R/$folder; done
busybox mount -t tmpfs -o mode=0755 run $R/run
busybox mkdir -p $R/run/lab
busybox mount -t 9p -o $P,cache=mmap control $R/run/lab || fail "no control folder"
for folder in dev proc sys; do busybox mount --move /$folder $R/$folder; done
exec busybox switch_root $R /run/lab/start
