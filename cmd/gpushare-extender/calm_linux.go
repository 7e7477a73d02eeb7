package main

import (
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// timerSlack is by how much the kernel may delay a thread that sleeps, to wake it together with others: little, beside
	// every time that matters to a call.
	timerSlack = 2 * time.Millisecond
	// calmed is in the environment of a program that calm has started anew. It may hold anything.
	calmed = "GPUSHARE_TIMER_SLACK_SET"
)

// calm lets a thread of Go's runtime sleep longer that watches over the others (sysmon in runtime/proc.go). It wakes every
// 70 µs while anything runs, a dozen times for each pod, and gets in the way of kube-scheduler, kube-apiserver and etcd,
// with which the extender shares its node (docs/performance.md). What makes it sleep longer is the timer slack that it
// inherits (prctl(2), PR_SET_TIMERSLACK). It is there before the first line of this program, so the program sets the slack
// and starts itself anew, within the same process. Where that can't be done, it goes on as it is.
func calm() {
	if _, again := os.LookupEnv(calmed); again {
		return
	}
	self, err := os.Executable()
	if err != nil {
		return
	}
	runtime.LockOSThread() // The thread that sets the slack is the one that goes on.
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack.Nanoseconds()), 0, 0, 0); err != nil {
		return
	}
	var files unix.Rlimit
	limited := unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
	_ = syscall.Exec(self, os.Args, append(os.Environ(), calmed+"=1"))
	// It returns only where it failed. By then it has taken the number of open files back to what it was before Go raised it.
	if limited == nil {
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &files)
	}
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) // The default.
}
