package realgpu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/mps"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

// skip skips a test with a visible message.
func skip(t *testing.T, reason string, args ...any) {
	t.Helper()
	text := fmt.Sprintf(reason, args...)
	fmt.Fprintf(os.Stderr, "SKIPPED %s: %s\n", t.Name(), text)
	t.Skip(text)
}

// saw prints what a test has seen of a card, also if it passes.
func saw(t *testing.T, text string, args ...any) {
	t.Helper()
	fmt.Fprintf(os.Stderr, "SAW %s: %s\n", t.Name(), fmt.Sprintf(text, args...))
}

// healthyCard returns a healthy card that no process uses, and a session with the driver.
func healthyCard(t *testing.T) (gpu.Card, *inventory.Session) {
	t.Helper()
	cards := listCards(t)
	session, err := inventory.OpenSession("")
	check.Must(t, err)
	t.Cleanup(func() { check.Must(t, session.Close()) })
	for _, card := range cards {
		if !card.Healthy() {
			continue
		}
		if processes, err := session.Processes(card.UUID); err == nil && len(processes) == 0 {
			return card, session
		}
	}
	skip(t, "no healthy card is idle: each has a process, such as Xorg's")
	return gpu.Card{}, nil
}

// buildProgram compiles the CUDA program.
var buildProgram = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "cudaprogram-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "cudaprogram")
	if out, err := exec.Command("cc", "-Wall", "-Werror", "-o", path, "cudaprogram/main.c", "-ldl").CombinedOutput(); err != nil {
		return "", fmt.Errorf("compiling the CUDA program: %w: %s", err, out)
	}
	return path, nil
})

// running is a program that was started.
type running struct {
	pid int
	// printed is its first line. It is empty if it printed none.
	printed string
	// free and total are what cuMemGetInfo reported before the allocation, in MiB.
	free, total int
	in          io.Closer
	// ended is closed when it has ended.
	ended chan struct{}
}

// end ends the program.
func (p *running) end() {
	_ = p.in.Close()
	<-p.ended
}

// hasEnded reports whether the program has ended.
func (p *running) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// launch starts a program in a cgroup, or in its own one if that is empty, and returns when it has printed a line. The program ends with the test.
// If it can't enter the cgroup, the shell's error is printed instead.
func launch(t *testing.T, cgroup string, env []string, program ...string) *running {
	t.Helper()
	const enter = `[ -z "$1" ] || { echo $$ >"$1/cgroup.procs"; } 2>&1 || exit 1; shift; exec "$@"`
	command := exec.Command("sh", append([]string{"-c", enter, "sh", cgroup}, program...)...)
	command.Env = append(os.Environ(), env...)
	in, err := command.StdinPipe()
	check.Must(t, err)
	out, err := command.StdoutPipe()
	check.Must(t, err)
	check.Must(t, command.Start())
	reader := bufio.NewReader(out)
	line, _ := reader.ReadString('\n')
	p := &running{pid: command.Process.Pid, printed: strings.TrimSpace(line), in: in, ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		_, _ = io.Copy(io.Discard, reader)
		_ = command.Wait()
	}()
	t.Cleanup(p.end)
	return p
}

// run launches the CUDA program and has it allocate memory. The error says why it has none.
func run(t *testing.T, cgroup string, mib int, env ...string) (*running, error) {
	t.Helper()
	program, err := buildProgram()
	if err != nil {
		skip(t, "%v", err)
	}
	p := launch(t, cgroup, env, program, fmt.Sprint(mib))
	if strings.Contains(p.printed, "libcuda.so.1: cannot open") {
		skip(t, "no program can use the card: %s", p.printed)
	}
	if !hasMemory(p.printed) {
		return p, fmt.Errorf("the program ends: %q", p.printed)
	}
	_, err = fmt.Sscanf(p.printed, "runs %d %d", &p.free, &p.total)
	return p, err
}

// TestUse: measured use has a real process with the memory that it allocated.
func TestUse(t *testing.T) {
	card, session := healthyCard(t)
	before, _, err := session.Memory(card.UUID)
	check.Must(t, err)
	p, err := run(t, "", 512, "CUDA_VISIBLE_DEVICES="+card.UUID)
	check.Must(t, err)
	processes, err := session.Processes(card.UUID)
	check.Must(t, err)
	i := slices.IndexFunc(processes, func(listed inventory.Process) bool { return listed.PID == p.pid })
	if i < 0 {
		skip(t, "the driver lists %+v and not process %d: this isn't the machine's PID namespace", processes, p.pid)
	}
	if bytes := processes[i].Bytes; bytes != inventory.UnknownBytes && bytes < 512<<20 {
		t.Errorf("the process uses %d bytes", bytes)
	}
	if after, _, err := session.Memory(card.UUID); err != nil || after < before+512<<20 {
		t.Errorf("the card used %d bytes before, %d now, %v", before, after, err)
	}
}

// TestDriverLimit: the driver's limit of a cgroup holds for all processes in it together, and can be read back.
func TestDriverLimit(t *testing.T) {
	card, session := healthyCard(t)
	const root = "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/cgroup.controllers"); err != nil || os.Geteuid() != 0 {
		skip(t, "it needs root and cgroup v2 at %s", root)
	}
	if _, err := session.Limit(card.UUID, root); err != nil {
		skip(t, "card %s (%s): %v", card.UUID, card.Model, err)
	}
	_, free, err := session.Memory(card.UUID)
	check.Must(t, err)
	if free>>20 < firstMiB+secondMiB+1024 { // Each program needs some hundred MiB more.
		skip(t, "card %s (%s) has only %d MiB free", card.UUID, card.Model, free>>20)
	}
	cgroup := filepath.Join(root, "gpushare-test")
	_ = os.Remove(cgroup) // An earlier test may not have come to its end.
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		skip(t, "no cgroup can be made: %v", err)
	}
	t.Cleanup(func() { _ = os.Remove(cgroup) })
	// gpushare never sets limits itself; NVIDIA's hook does it like this.
	library := nvml.New()
	if ret := library.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	defer func() { _ = library.Shutdown() }()
	handle, ret := library.DeviceGetHandleByUUID(card.UUID)
	if ret == nvml.SUCCESS {
		ret = handle.SetMemoryLimits_v1(cgroup, 0, limitMiB<<20)
	}
	if ret != nvml.SUCCESS {
		t.Fatalf("setting the limit: %v", ret)
	}
	limit, err := session.Limit(card.UUID, cgroup)
	saw(t, "a limit of %d MiB of card %s (%s) for a cgroup is read back as %d MiB, error %v", limitMiB, card.UUID, card.Model, limit.Hard>>20, err)
	if err != nil || limit.Hard != limitMiB<<20 {
		t.Error("the driver doesn't have the limit")
	}
	visible := "CUDA_VISIBLE_DEVICES=" + card.UUID
	alone, _ := run(t, cgroup, secondMiB, visible)
	alone.end()
	first, firstErr := run(t, cgroup, firstMiB, visible)
	limit, err = session.Limit(card.UUID, cgroup)
	saw(t, "the use of the cgroup, in which one program has %d MiB, is read as %d MiB, error %v", firstMiB, limit.Used>>20, err)
	if firstErr == nil && (err != nil || limit.Used < firstMiB<<20) {
		t.Error("the driver doesn't count the use of the cgroup")
	}
	second, _ := run(t, cgroup, secondMiB, visible)
	seen := printed{alone: alone.printed, first: first.printed, second: second.printed, firstEnded: first.hasEnded()}
	saw(t, "%s", seen)
	outcome, why := seen.verdict()
	saw(t, "%s: %s", outcome, why)
	if outcome != holds {
		t.Errorf("%s: %s", outcome, why)
	}
	if firstErr == nil && first.total != limitMiB {
		saw(t, "PROGRAMS DON'T SEE THE LIMIT: cuMemGetInfo reports a total of %d MiB", first.total)
		t.Errorf("cuMemGetInfo reports a total of %d MiB, want the limit", first.total)
	}
}

// TestMPS: a real control daemon, which the supervisor runs, limits the memory of its clients. Killed, it takes its clients along and is
// started again. At the end the card has its former compute mode.
func TestMPS(t *testing.T) {
	card, session := healthyCard(t)
	compute, err := session.Compute(card.UUID)
	check.Must(t, err)
	control, err := exec.LookPath("nvidia-cuda-mps-control")
	switch {
	case err != nil:
		skip(t, "%v", err)
	case os.Geteuid() != 0:
		skip(t, "only root can set a compute mode")
	case isolation.MPSCapable(compute.Major, compute.Minor) != nil:
		skip(t, "%v", isolation.MPSCapable(compute.Major, compute.Minor))
	case compute.Mode != inventory.ComputeDefault:
		skip(t, "the card's compute mode is %s: an MPS daemon may run already", compute.Mode)
	}
	root, err := os.MkdirTemp("", "mps") // The path is short because it contains sockets.
	check.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	directory := isolation.MPSDirectory(root)
	check.Must(t, directory.WriteCards([]string{card.UUID}))
	open := func() (mps.Driver, error) { // A session is for one goroutine.
		own, err := inventory.OpenSession("")
		return oneCard{own, card.UUID}, err
	}
	supervisor, err := mps.New(mps.Options{Directory: directory, Open: open, Control: control})
	check.Must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- supervisor.Run(ctx) }()
	end := sync.OnceValue(func() error {
		stop()
		return <-ended
	})
	defer func() { check.Must(t, end()) }()
	ready := func() (status isolation.MPSStatus) {
		t.Helper()
		framework.Eventually(t, "the daemon is ready", func(context.Context) error {
			var err error
			if status, err = directory.ReadStatus(card.UUID); err == nil && status.State != isolation.MPSReady {
				err = errors.New(strings.Join(supervisor.NotReady(), ", "))
			}
			return err
		})
		return status
	}
	status := ready()
	edits, err := isolation.NewBackends(isolation.Options{MPS: directory}).Of(isolation.MPS).Apply(
		[]isolation.Share{{Card: isolation.Card{UUID: card.UUID}, Limit: 1 << 30}})
	check.Must(t, err)
	env := []string{"CUDA_VISIBLE_DEVICES=" + card.UUID}
	for name, value := range edits.Env {
		env = append(env, name+"="+value)
	}
	client, err := run(t, "", 256, env...)
	check.Must(t, err)
	t.Logf("cuMemGetInfo reports %d MiB free of %d", client.free, client.total)
	if p, _ := run(t, "", 2048, env...); !outOfMemory(p.printed) {
		t.Errorf("above the limit the program prints %q", p.printed)
	}
	if p, err := run(t, "", 256, "CUDA_VISIBLE_DEVICES="+card.UUID, "CUDA_MPS_PIPE_DIRECTORY="+t.TempDir()); err == nil {
		t.Errorf("process %d uses the card without MPS", p.pid)
	}
	processes, err := session.Processes(card.UUID)
	t.Logf("server %v; the driver lists %+v, %v", status.Servers, processes, err)

	server, err := os.FindProcess(status.Servers[0])
	check.Must(t, err)
	check.Must(t, server.Kill())
	<-client.ended
	framework.Eventually(t, "there is another server", func(context.Context) error {
		if now := ready(); len(now.Servers) == 0 || now.Servers[0] == status.Servers[0] {
			return fmt.Errorf("servers %v", now.Servers)
		}
		return nil
	})
	_, err = run(t, "", 256, env...)
	check.Must(t, err)
	check.Must(t, end())
	if after, err := session.Compute(card.UUID); err != nil || after.Mode != inventory.ComputeDefault {
		t.Errorf("the compute mode is %s, %v", after.Mode, err)
	}
}

// oneCard shows the supervisor a single card.
type oneCard struct {
	*inventory.Session
	uuid string
}

// Cards implements mps.Driver.
func (c oneCard) Cards() []string { return []string{c.uuid} }
