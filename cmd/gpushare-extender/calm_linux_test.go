package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// asCalmed makes the test binary call calm and print the result.
const asCalmed = "GPUSHARE_TEST_AS_CALMED"

func init() {
	if os.Getenv(asCalmed) == "" {
		return
	}
	calm()
	// A new thread inherits the slack of the thread that started it.
	runtime.LockOSThread()
	slack, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	var files unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
	fmt.Println(slack, err, os.Getpid(), strings.Join(os.Args[1:], " "), files.Cur+1 >= files.Max) // Go leaves one.
	os.Exit(0)
}

// TestCalm checks that calm executes the program once more, in the same process, with more timer slack.
func TestCalm(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // Instead of forever.
	defer cancel()
	for name, test := range map[string]struct {
		environment []string
		slack       func(slack int) bool
	}{
		"at once":                              {nil, func(slack int) bool { return slack == int(timerSlack.Nanoseconds()) }},
		"not again, if the slack was lost":     {[]string{calmed + "=1"}, func(slack int) bool { return slack < int(timerSlack.Nanoseconds()) }},
		"not at all, if the variable is empty": {[]string{calmed + "="}, func(slack int) bool { return slack < int(timerSlack.Nanoseconds()) }},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := command(ctx, "--some", "argument")
			cmd.Env = append(append(cmd.Env, asCalmed+"=1"), test.environment...)
			var out bytes.Buffer
			cmd.Stdout = &out
			if err := cmd.Run(); err != nil {
				t.Fatal(err)
			}
			var slack, pid int
			var problem string
			var files bool
			if _, err := fmt.Sscanf(out.String(), "%d %s %d --some argument %t\n", &slack, &problem, &pid, &files); err != nil {
				t.Fatalf("printed %q: %v", out.String(), err)
			}
			if problem != "<nil>" || !test.slack(slack) {
				t.Errorf("timer slack is %d ns (%s)", slack, problem)
			}
			if pid != cmd.ProcessState.Pid() {
				t.Error("the process ID has changed")
			}
			if !files {
				t.Error("the limit of open files is lower than before")
			}
		})
	}
}

// TestCalmExecFails checks that a program that can't be executed again continues unchanged.
func TestCalmExecFails(t *testing.T) {
	gone := filepath.Join(t.TempDir(), "gone")
	text, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	// Once the program runs, its file is removed: os.Executable then returns a path that doesn't exist.
	script := fmt.Sprintf(`exec 3<%s; rm %s; ulimit -Sn 64; exec /proc/self/fd/3 --some argument`, gone, gone)
	if err := os.WriteFile(gone, text, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := command(t.Context())
	cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", script}
	cmd.Env = append(cmd.Env, asCalmed+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var slack, pid int
	var files bool
	if _, err := fmt.Sscanf(string(out), "%d <nil> %d --some argument %t\n", &slack, &pid, &files); err != nil {
		t.Fatalf("printed %q: %v", out, err)
	}
	if slack >= int(timerSlack.Nanoseconds()) || !files {
		t.Errorf("timer slack is %d ns; limit of open files kept: %t", slack, files)
	}
}
