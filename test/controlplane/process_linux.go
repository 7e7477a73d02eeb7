package controlplane

import "syscall"

// dieWithParent has the kernel kill the child when its parent ends, also by SIGKILL. The child gets a process group of
// its own, so that a Ctrl-C on the terminal reaches the parent alone, which then stops everything in order.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
