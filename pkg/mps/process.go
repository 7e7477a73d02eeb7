package mps

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/inventory"
)

// process is a running control daemon.
type process struct {
	command *exec.Cmd
	// ended is closed when the process has ended. failure is set before.
	ended   chan struct{}
	failure error
}

// err returns how a process that has ended did.
func (p *process) err() error {
	if p.failure != nil {
		return fmt.Errorf("the daemon has ended: %w", p.failure)
	}
	return errors.New("the daemon has ended")
}

// environment returns that of the daemon and of the programs that talk to it.
func (d *daemon) environment() []string {
	return append(os.Environ(), "CUDA_VISIBLE_DEVICES="+d.uuid,
		"CUDA_MPS_PIPE_DIRECTORY="+d.Directory.Pipe(d.uuid), "CUDA_MPS_LOG_DIRECTORY="+d.Directory.Log(d.uuid))
}

// multiUser is the option with which one server takes the clients of all users. Daemons without it serve one user at a time.
const multiUser = "-multiuser-server"

// start starts the control daemon in the foreground, in a process group with its servers.
func (d *daemon) start(ctx context.Context) (*process, error) {
	args := []string{"-f"}
	if help, err := d.run(ctx, "", "-h"); err == nil && strings.Contains(help, multiUser) {
		args = append(args, multiUser)
	}
	command := exec.Command(d.Control, args...)
	command.Env = d.environment()
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	command.Stdout, command.Stderr = in, in
	err = command.Start()
	_ = in.Close()
	if err != nil {
		_ = out.Close()
		return nil, fmt.Errorf("starting the daemon: %w", err)
	}
	go logLines(klog.FromContext(ctx), out)
	p := &process{command: command, ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		p.failure = command.Wait()
	}()
	return p, nil
}

// logLines logs what a daemon and its servers write, until the last of them has ended.
func logLines(logger klog.Logger, out io.ReadCloser) {
	defer out.Close()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		logger.Info("The MPS daemon says", "line", lines.Text())
	}
	_, _ = io.Copy(io.Discard, out) // A line was too long.
}

// stop ends a daemon, and its servers with their clients. No program can begin to use the card before it has ended.
func (d *daemon) stop(p *process) error {
	err := d.driver.SetMode(d.uuid, inventory.ComputeProhibited)
	select {
	case <-p.ended:
	default:
		_, _ = d.ask(context.Background(), "quit -t 1")
		select {
		case <-p.ended:
		case <-time.After(d.Timeout):
		}
	}
	// The daemon leads its group, whose ID stays taken as long as a server is left in it.
	if kill := unix.Kill(-p.command.Process.Pid, unix.SIGKILL); kill != nil && !errors.Is(kill, unix.ESRCH) {
		err = errors.Join(err, fmt.Errorf("killing the daemon: %w", kill))
	}
	<-p.ended
	return err
}

// servers asks the daemon for the process IDs of its servers.
func (d *daemon) servers(ctx context.Context) (pids []int, err error) {
	answer, err := d.ask(ctx, "get_server_list")
	if err != nil {
		return nil, err
	}
	for word := range strings.FieldsSeq(answer) {
		pid, err := strconv.Atoi(word)
		if err != nil {
			return nil, fmt.Errorf("get_server_list: %.100q", answer)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// ask sends a line to the daemon and returns its answer.
func (d *daemon) ask(ctx context.Context, line string) (string, error) {
	answer, err := d.run(ctx, line+"\n")
	if err != nil {
		return "", fmt.Errorf("%s: %w", line, err)
	}
	return strings.TrimSpace(answer), nil
}

// run runs nvidia-cuda-mps-control, for at most Timeout, and returns what it writes.
func (d *daemon) run(ctx context.Context, input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	command := exec.CommandContext(ctx, d.Control, args...)
	command.Env, command.Stdin, command.WaitDelay = d.environment(), strings.NewReader(input), d.Timeout
	out, err := command.CombinedOutput()
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return "", fmt.Errorf("no answer within %s", d.Timeout)
	case err != nil:
		return "", fmt.Errorf("%w: %.200s", err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// empty removes what is in a directory.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, entry.Name())))
	}
	return err
}
