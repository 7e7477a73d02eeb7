package main

import (
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// timerSlack is how much longer the kernel may let a thread sleep, to wake it together with others. It is small compared
	// with the duration of any call.
	timerSlack = 2 * time.Millisecond
	// calmed is set in the environment of a program that calm has executed again. Its value doesn't matter.
	calmed = "GPUSHARE_TIMER_SLACK_SET"
)

// calm makes the monitoring thread of Go's runtime (sysmon in runtime/proc.go) sleep longer. It wakes every 70 µs while
// anything runs, and takes CPU time from kube-scheduler, kube-apiserver and etcd on the same node (docs/performance.md).
// Threads inherit their timer slack (prctl(2), PR_SET_TIMERSLACK), and sysmon exists before main runs. So calm sets the
// slack and executes the program again in the same process. If that fails, the program continues without it.
func calm() {
	if _, again := os.LookupEnv(calmed); again {
		return
	}
	self, err := os.Executable()
	if err != nil {
		return
	}
	runtime.LockOSThread() // Only the thread that sets the slack survives exec.
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack.Nanoseconds()), 0, 0, 0); err != nil {
		return
	}
	var files unix.Rlimit
	limited := unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
	_ = syscall.Exec(self, os.Args, append(os.Environ(), calmed+"=1"))
	// Exec returns only on failure. It has then reset the limit of open files to its value before Go raised it.
	if limited == nil {
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &files)
	}
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) // The default.
}
