//go:build !linux

package controlplane

import "syscall"

// dieWithParent has no equivalent on other systems: kill the processes of a killed test by hand.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{} }
