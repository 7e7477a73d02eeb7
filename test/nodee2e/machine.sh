#!/bin/sh
# Process 1 of a machine within this one: machine.sh FOLDER. It runs in mount and process namespaces of its own, and
# what it mounts is gone with it. Standing still, it collects the processes that others leave behind.
set -eu
dir=$1

mount --make-rshared /
# The kubelet's and containerd's folders, under their usual names.
mount --bind "$dir/var" /var
mount -t tmpfs -o mode=755 tmpfs /run
# /etc is this machine's. Where the node is one of kubeadm's, it has an /etc/kubernetes of its own.
if [ -d "$dir/etc/kubernetes" ]; then
	mount -t overlay overlay -o "lowerdir=$dir/etc:/etc" /etc
	mount --bind /var/lib/kubernetes /etc/kubernetes
fi
# The kubelet sets what the whole kernel goes by; here it sets files.
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
