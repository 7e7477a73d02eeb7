package controlplane

import "syscall"

// dieWithParent makes the kernel kill the child when its parent ends, even by SIGKILL. The child gets its own process
// group, so that Ctrl-C on the terminal reaches only the parent, which then stops all children in order.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
