package controlplane

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
)

func shell(t *testing.T, script string) *Process {
	t.Helper()
	return &Process{
		Name: "script", Path: "/bin/sh", Args: []string{"-c", script},
		LogPath: filepath.Join(t.TempDir(), "logs", "script.log"),
	}
}

func TestProcessExit(t *testing.T) {
	tests := map[string]struct {
		script string
		code   int
		clean  bool
		log    string
	}{
		"status 0":    {script: "echo fine", code: 0, clean: true, log: "fine"},
		"status 3":    {script: "echo bad >&2; exit 3", code: 3, log: "bad"},
		"killed":      {script: "kill -9 $$", code: -1},
		"environment": {script: "echo $GREETING; echo $LEAK", clean: true, log: "hello\n"},
	}
	t.Setenv("LEAK", "of the test's environment")
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := shell(t, test.script)
			p.Env = []string{"GREETING=hello"}
			RunForTest(t, p)
			err := p.Wait(t.Context())
			if (err == nil) != test.clean {
				t.Errorf("Wait returned %v", err)
			}
			if p.ExitCode() != test.code || p.Running() {
				t.Errorf("exit code %d, want %d; running %v", p.ExitCode(), test.code, p.Running())
			}
			if got := p.Tail(2); strings.TrimSpace(got) != strings.TrimSpace(test.log) {
				t.Errorf("the log has %q, want %q", got, test.log)
			}
		})
	}
}

func TestProcessTerminate(t *testing.T) {
	p := shell(t, `trap "exit 7" TERM; echo up; while :; do sleep 0.01; done`)
	p.Ready = logged(p, "up")
	RunForTest(t, p)
	if err := p.Start(t.Context()); err == nil {
		t.Error("a running process was started a second time")
	}
	must(t, p.Terminate(t.Context()))
	if p.ExitCode() != 7 {
		t.Errorf("exit code %d, want 7: SIGTERM didn't reach it", p.ExitCode())
	}
	must(t, p.Terminate(t.Context())) // Terminating an ended process is no error.
}

func TestProcessTerminateTimeout(t *testing.T) {
	p := shell(t, `trap "" TERM; echo up; while :; do sleep 0.01; done`)
	p.Ready = logged(p, "up")
	RunForTest(t, p)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Terminate(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want a deadline error", err)
	}
	if !p.Running() {
		t.Error("Terminate killed the process")
	}
	must(t, p.Kill())
	if p.Running() || !gone(p.Pid()) {
		t.Error("the process runs after Kill")
	}
}

func TestProcessPauseAndRestart(t *testing.T) {
	p := shell(t, "while :; do sleep 0.01; done")
	RunForTest(t, p)
	must(t, p.Pause())
	await(t, "the process is stopped", func(context.Context) (bool, error) { return state(p.Pid()) == "T", nil })
	must(t, p.Resume())
	await(t, "the process runs", func(context.Context) (bool, error) { return state(p.Pid()) != "T", nil })

	first, exited := p.Pid(), p.Exited()
	must(t, p.Pause())
	must(t, p.Restart(t.Context())) // Also from the paused state.
	<-exited
	if p.Pid() == first || !p.Running() || !gone(first) {
		t.Errorf("process %d became %d, running %v", first, p.Pid(), p.Running())
	}
}

func TestProcessExitsBeforeReady(t *testing.T) {
	p := shell(t, "echo the reason; exit 4")
	p.Ready = func(context.Context) error { return errors.New("not yet") }
	err := p.Start(t.Context())
	for _, want := range []string{"exit status 4", "the reason", p.LogPath} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error doesn't contain %q: %v", want, err)
		}
	}
}

func TestProcessNeverReady(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	p := shell(t, "exec sleep 1000")
	p.Ready = HTTPReady(server.URL)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := p.Start(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "404") {
		t.Errorf("got %v, want a deadline error with the last answer", err)
	}
	if p.Running() {
		t.Error("the process still runs")
	}
}

func TestProcessOutlivesThread(t *testing.T) {
	p := shell(t, "exec sleep 1000")
	thread := make(chan string)
	go func() {
		runtime.LockOSThread()                      // Never unlocked, so that the thread ends with the goroutine.
		id, err := os.Readlink("/proc/thread-self") // PID/task/TID
		check.NoError(t, err)
		check.NoError(t, p.Start(t.Context()))
		thread <- id
	}()
	id := <-thread
	t.Cleanup(func() { must(t, p.Kill()) })
	if path.Base(id) != strconv.Itoa(os.Getpid()) { // The main thread of a process never ends.
		await(t, "the thread has ended", func(context.Context) (bool, error) {
			_, err := os.Stat("/proc/" + id)
			return os.IsNotExist(err), nil
		})
	}
	must(t, p.Signal(syscall.SIGTERM))
	var exit *exec.ExitError
	if err := p.Wait(t.Context()); !errors.As(err, &exit) {
		t.Fatalf("got %v, want an exit error", err)
	}
	if got := exit.Sys().(syscall.WaitStatus).Signal(); got != syscall.SIGTERM {
		t.Errorf("ended by %v, want %v", got, syscall.SIGTERM)
	}
}

func TestProcessDiesWithParent(t *testing.T) {
	const asParent = "GPUSHARE_TEST_AS_PARENT"
	if os.Getenv(asParent) != "" {
		p := shell(t, "exec sleep 1000")
		must(t, p.Start(t.Context()))
		fmt.Println("child", p.Pid())
		<-p.Exited() // Never returns: the test kills this process.
	}
	parent := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	parent.Env = append(os.Environ(), asParent+"=1", "TMPDIR="+t.TempDir()) // The parent can't clean up after itself.
	out, err := parent.StdoutPipe()
	must(t, err)
	must(t, parent.Start())
	child := 0
	for lines := bufio.NewScanner(out); child == 0 && lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), "child "); ok {
			child, err = strconv.Atoi(text)
			must(t, err)
		}
	}
	if child == 0 || gone(child) {
		t.Errorf("the parent reported no running child (%d)", child)
	}
	must(t, parent.Process.Kill())
	_ = parent.Wait()
	await(t, "the child has ended", func(context.Context) (bool, error) { return gone(child), nil })
}

func TestReservePort(t *testing.T) {
	port := ReservePortForTest(t)
	for range 2 { // A server can stop and start again.
		listener, err := net.Listen("tcp", port.Address())
		must(t, err)
		if _, err := net.Listen("tcp", port.Address()); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("a second server: got %v, want %v", err, syscall.EADDRINUSE)
		}
		must(t, listener.Close())
	}
	if _, err := net.Dial("tcp", port.Address()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dialling a reserved port without a server: got %v, want %v", err, syscall.ECONNREFUSED)
	}
	for range 1000 {
		other, err := ReservePort()
		must(t, err)
		defer other.Release()
		if other.Number == port.Number {
			t.Fatal("the port was reserved twice")
		}
	}
}

// logged returns a Process.Ready that waits for a line in the log.
func logged(p *Process, line string) func(context.Context) error {
	return func(context.Context) error {
		if !strings.Contains(p.Tail(10), line) {
			return fmt.Errorf("the log doesn't contain %q", line)
		}
		return nil
	}
}

// gone reports whether no process with this ID runs. A zombie counts as gone.
func gone(pid int) bool {
	s := state(pid)
	return s == "" || s == "Z" || s == "X"
}

// state returns the kernel's letter for the state of a process, or an empty string if there is no such process.
func state(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The name, in parentheses, can contain any character.
	_, rest, _ := strings.Cut(string(data[strings.LastIndexByte(string(data), ')'):]), " ")
	letter, _, _ := strings.Cut(rest, " ")
	return letter
}
