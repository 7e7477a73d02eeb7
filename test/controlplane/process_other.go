//go:build !linux

package controlplane

import "syscall"

// dieWithParent has no equivalent elsewhere: what a killed test leaves behind must be ended by hand.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{} }
