package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// readyTimeout limits the wait for a process to become ready, in addition to the caller's context. It is long
	// because a machine that builds and tests at the same time is slow.
	readyTimeout = 2 * time.Minute
	readyPoll    = 25 * time.Millisecond
	tailLines    = 30
)

// passedOn are the variables that a process inherits. All others are removed, so that a KUBECONFIG or NODE_NAME in the
// developer's environment has no effect.
var passedOn = []string{"PATH", "HOME", "TMPDIR", "GOCOVERDIR", "GORACE"}

// Process is a program that can be started, stopped, paused and restarted. The exported fields can be changed while it
// isn't running. Its methods are safe for concurrent use, except that only one goroutine may call Start.
type Process struct {
	// Name is for messages.
	Name string
	Path string
	Args []string
	// Env is added to the inherited variables.
	Env []string
	// LogPath is the file to which stdout and stderr are appended.
	LogPath string
	// Ready returns nil once the process serves; Start polls it. If it is nil, a started process counts as ready.
	Ready func(ctx context.Context) error

	mu  sync.Mutex
	run *run // The current or the last run; nil before the first.
}

// run is one run of a process.
type run struct {
	process *os.Process
	exited  chan struct{}
	err     error // The result of exec.Cmd.Wait; set before exited is closed.
	code    int
}

// Start starts the process and waits until it is ready. If the process ends before that, or isn't ready when ctx ends,
// Start kills it and returns an error with the last lines of its log.
func (p *Process) Start(ctx context.Context) error {
	if err := p.spawn(); err != nil {
		return fmt.Errorf("starting %s: %w", p.Name, err)
	}
	if err := p.WaitReady(ctx); err != nil {
		return errors.Join(err, p.Kill())
	}
	return nil
}

// WaitReady waits until Ready returns nil.
func (p *Process) WaitReady(ctx context.Context) error {
	r := p.current()
	if r == nil {
		return fmt.Errorf("waiting for %s: it was never started", p.Name)
	}
	if p.Ready == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	ticker := time.NewTicker(readyPoll)
	defer ticker.Stop()
	last := errors.New("none")
	for {
		err := p.Ready(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			last = err // Later errors only report that ctx has ended.
		}
		select {
		case <-r.exited:
			return fmt.Errorf("%s ended before it was ready (%w); %s", p.Name, r.err, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w; last answer: %w; %s", p.Name, ctx.Err(), last, p.tail())
		case <-ticker.C:
		}
	}
}

func (p *Process) spawn() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run.running() {
		return fmt.Errorf("already running as process %d", p.run.process.Pid)
	}
	if err := os.MkdirAll(filepath.Dir(p.LogPath), 0o755); err != nil {
		return fmt.Errorf("creating the log's folder: %w", err)
	}
	log, err := os.OpenFile(p.LogPath, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("opening the log: %w", err)
	}
	defer log.Close() // The child has its own descriptor.

	cmd := exec.Command(p.Path, p.Args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(inherited(), p.Env...)
	cmd.SysProcAttr = dieWithParent()

	r := &run{exited: make(chan struct{}), code: -1}
	started := make(chan error)
	go func() {
		// The kernel sends the parent-death signal when the *thread* that forked ends. This goroutine keeps its thread
		// while the child lives; otherwise the runtime could end the thread at any time.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		r.process = cmd.Process
		started <- nil
		r.err = cmd.Wait()
		r.code = cmd.ProcessState.ExitCode()
		if r.err == nil {
			r.err = errExitedCleanly
		}
		close(r.exited)
	}()
	if err := <-started; err != nil {
		return err
	}
	p.run = r
	return nil
}

var errExitedCleanly = errors.New("exit status 0")

func inherited() []string {
	var env []string
	for _, name := range passedOn {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

func (r *run) running() bool {
	if r == nil {
		return false
	}
	select {
	case <-r.exited:
		return false
	default:
		return true
	}
}

func (p *Process) current() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

// Running reports whether the process runs. A paused process runs.
func (p *Process) Running() bool { return p.current().running() }

// Pid returns the ID of the current or last process, and 0 before the first start.
func (p *Process) Pid() int {
	if r := p.current(); r != nil {
		return r.process.Pid
	}
	return 0
}

// Exited returns a channel that is closed when the current run ends, or nil before the first start.
func (p *Process) Exited() <-chan struct{} {
	if r := p.current(); r != nil {
		return r.exited
	}
	return nil
}

// ExitCode returns the exit status of the last run. It is -1 while the process runs, or if a signal ended it.
func (p *Process) ExitCode() int {
	if r := p.current(); r != nil && !r.running() {
		return r.code
	}
	return -1
}

// Wait waits until the process has ended. It returns an *exec.ExitError if the exit status isn't 0.
func (p *Process) Wait(ctx context.Context) error {
	r := p.current()
	if r == nil {
		return nil
	}
	select {
	case <-r.exited:
		if errors.Is(r.err, errExitedCleanly) {
			return nil
		}
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("waiting for %s (process %d) to end: %w", p.Name, r.process.Pid, ctx.Err())
	}
}

// Kill sends SIGKILL and returns when the process has ended. It is no error if the process doesn't run.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	if exited := p.Exited(); exited != nil {
		<-exited
	}
	return nil
}

// Terminate sends SIGTERM and waits until the process has ended, with any status (see ExitCode). It returns an error if
// the process still runs when ctx ends; it doesn't kill it then.
func (p *Process) Terminate(ctx context.Context) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := p.Wait(ctx); err != nil && p.Running() {
		return err
	}
	return nil
}

// Restart kills the process, if it runs, and starts it again. To stop it gracefully, call Terminate and Start.
func (p *Process) Restart(ctx context.Context) error {
	if err := p.Kill(); err != nil {
		return err
	}
	return p.Start(ctx)
}

// Pause freezes the process (SIGSTOP): its connections stay open, but it doesn't answer. The signal stops its threads one
// after the other; Pause returns when all have stopped, or the process has ended, and an error if they don't.
func (p *Process) Pause() error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for deadline := time.Now().Add(10 * time.Second); p.Running() && !stopped(p.Pid()); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("pausing %s: not all of its threads have stopped", p.Name)
		}
	}
	return nil
}

// stopped reports whether all threads of the process are stopped.
func stopped(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, thread := range threads {
		// The state follows the name, which is in parentheses (man proc_pid_stat). A file that can't be read is of a thread
		// that has ended.
		stat, err := os.ReadFile(thread)
		if _, state, found := bytes.Cut(stat, []byte(") ")); err == nil && (!found || state[0] != 'T') {
			return false
		}
	}
	return len(threads) > 0
}

// Resume continues a paused process (SIGCONT).
func (p *Process) Resume() error { return p.Signal(syscall.SIGCONT) }

// Signal sends a signal to the process. It is no error if the process has ended.
func (p *Process) Signal(signal os.Signal) error {
	r := p.current()
	if r == nil {
		return nil
	}
	if err := r.process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("sending %v to %s: %w", signal, p.Name, err)
	}
	return nil
}

// Tail returns the last lines of the log, or the error if it can't be read.
func (p *Process) Tail(lines int) string {
	const maxBytes = 256 << 10
	file, err := os.Open(p.LogPath)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil && info.Size() > maxBytes {
		if _, err := file.Seek(-maxBytes, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	data, err := io.ReadAll(file)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(string(bytes.TrimRight(data, "\n")), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func (p *Process) tail() string {
	return fmt.Sprintf("the end of %s:\n%s", p.LogPath, p.Tail(tailLines))
}
