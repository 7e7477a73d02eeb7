package controlplane

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

func shell(t *testing.T, script string) *Process {
	t.Helper()
	return &Process{
		Name: "script", Path: "/bin/sh", Args: []string{"-c", script},
		LogPath: filepath.Join(t.TempDir(), "logs", "script.log"),
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
