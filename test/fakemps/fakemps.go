// Package fakemps gives tests NVIDIA's Multi-Process Service on the simulated cards of package fakenvml: a stub of the control
// daemon and of the server, and a stub of CUDA programs. README.md has its rules.
package fakemps

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// Service is the programs, and the folder with what they share.
type Service struct {
	// Control and Client are the paths of nvidia-cuda-mps-control and of the CUDA program.
	Control, Client string
	// Dir has the journal and the faults.
	Dir string
	// User is the user of CUDA programs; root by default.
	User uint32
}

// program compiles the programs, which are one file, and returns it. The tests of a package share it.
var program = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "fakemps")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "program")
	build := exec.Command("go", "build", "-o", path, "github.com/gpushare/gpushare/test/fakemps/program")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compiling the stub of MPS: %w: %s", err, out)
	}
	return os.ReadFile(path)
})

// Build writes the programs into dir, which is also the folder that they share.
func Build(dir string) (Service, error) {
	s := Service{Control: filepath.Join(dir, "nvidia-cuda-mps-control"), Client: filepath.Join(dir, "cuda-client"), Dir: dir}
	content, err := program()
	if err != nil {
		return s, err
	}
	return s, errors.Join(os.WriteFile(s.Control, content, 0o755), os.Mkdir(filepath.Join(dir, "faults"), 0o755), os.Symlink(filepath.Base(s.Control), s.Client))
}

// Env returns the variables with which the programs find the folder. They also need those of the fake driver.
func (s Service) Env() []string { return []string{"FAKE_MPS=" + s.Dir, "FAKE_MPS_SHM=" + s.Dir} }

// Fault is what a card's daemon does wrong.
type Fault string

// The faults.
const (
	FaultStart  Fault = "start"  // The daemon ends at once.
	FaultServer Fault = "server" // Its server ends at once.
	FaultHang   Fault = "hang"   // The daemon takes connections and doesn't answer, as long as the fault lasts.
	FaultServes Fault = "fault"  // The server's status is FAULT.
)

// SetFault sets or removes a fault of a card.
func (s Service) SetFault(card string, fault Fault, on bool) error {
	path := filepath.Join(s.Dir, "faults", card+"."+string(fault))
	if on {
		return os.WriteFile(path, nil, 0o600)
	}
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Line is a line of the journal.
type Line struct {
	// Program is control, server or client.
	Program string
	PID     int
	// Card is the UUID of its card.
	Card string
	// Text is what happened, such as "runs 2048M" or "runs unlimited".
	Text string
}

// Journal returns what the programs have done, in order.
func (s Service) Journal() (lines []Line, err error) {
	data, err := os.ReadFile(filepath.Join(s.Dir, "journal"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for text := range strings.Lines(string(data)) {
		words := strings.SplitN(strings.TrimSpace(text), " ", 4)
		if len(words) != 4 || !strings.HasSuffix(text, "\n") {
			continue // It isn't complete.
		}
		pid, err := strconv.Atoi(words[1])
		if err != nil {
			return nil, fmt.Errorf("the journal of MPS: %q: %w", text, err)
		}
		lines = append(lines, Line{words[0], pid, words[2], words[3]})
	}
	return lines, err
}

// Process is a CUDA program that runs.
type Process struct {
	PID int
	// Ended is closed when the program has ended.
	Ended <-chan struct{}
}

// StartClient starts a CUDA program with this environment and returns when it uses its card, with an error if it can't. It ends with the test.
func (s Service) StartClient(t testing.TB, env ...string) (*Process, error) {
	t.Helper()
	cmd := exec.Command(s.Client)
	cmd.Env = append(os.Environ(), env...)
	if s.User != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: s.User, Gid: s.User}}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	reader := bufio.NewReader(out)
	line, err := reader.ReadString('\n')
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, reader)
		_ = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	if err != nil || line != "runs\n" {
		return nil, fmt.Errorf("the program ends: %s", strings.TrimSpace(line))
	}
	return &Process{PID: cmd.Process.Pid, Ended: ended}, nil
}
