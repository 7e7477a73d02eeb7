#!/bin/sh
# Process 1 of a machine within this one: machine.sh FOLDER. It runs in its own mount and process namespaces, with which
# its mounts end. It waits, and collects orphaned processes.
set -eu
dir=$1

mkdir -p "$dir/var/lib" "$dir/var/log" "$dir/var/tmp" "$dir/sysctl"
ln -s /run "$dir/var/run"

mount --make-rshared /
# The kubelet's and containerd's folders, under their usual names.
mount --bind "$dir/var" /var
mount -t tmpfs -o mode=755 tmpfs /run
# NVIDIA's hook for memory limits needs cgroup version 2 at its usual place.
if [ ! -e /sys/fs/cgroup/cgroup.controllers ]; then
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
# /etc is that of this machine. A node of kubeadm has its own /etc/kubernetes.
if [ -d "$dir/etc/kubernetes" ]; then
	mount -t overlay overlay -o "lowerdir=$dir/etc:/etc" /etc
	mount --bind /var/lib/kubernetes /etc/kubernetes
fi
# The kubelet sets these for the whole kernel; here it sets files.
for key in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
	kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
	if [ -e "/proc/sys/$key" ]; then
		file=$dir/sysctl/$(echo "$key" | tr / .)
		cat "/proc/sys/$key" >"$file"
		mount --bind "$file" "/proc/sys/$key"
	fi
done
: >"$dir/up"
sleep infinity &
wait
