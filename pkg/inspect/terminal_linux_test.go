package inspect

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// openTerminal returns both ends of a new pseudo-terminal: the user's and the program's.
func openTerminal(t *testing.T) (user, program *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("SKIPPED: this machine gives no pseudo-terminal: %v", err)
	}
	user = os.NewFile(uintptr(fd), "/dev/ptmx")
	t.Cleanup(func() { user.Close() })
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	check.Must(t, errors.Join(err, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)))
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("SKIPPED: this machine gives no pseudo-terminal: %v", err)
	}
	t.Cleanup(func() { program.Close() })
	return user, program
}

// screenOf collects the output that the user sees.
func screenOf(user *os.File) *output {
	seen := newOutput()
	go func() {
		buffer := make([]byte, 4096)
		for {
			n, err := user.Read(buffer)
			if err != nil {
				return
			}
			_, _ = seen.Write(buffer[:n])
		}
	}()
	return seen
}

// TestWatchOnTerminal checks on a pseudo-terminal that each table replaces the last one, and has bars.
func TestWatchOnTerminal(t *testing.T) {
	for term, separator := range map[string]string{"xterm": clearScreen, "dumb": "========"} {
		t.Run(term, func(t *testing.T) {
			t.Setenv("NO_COLOR", "1")
			t.Setenv("TERM", term)
			user, program := openTerminal(t)
			check.Must(t, unix.IoctlSetWinsize(int(program.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: 120, Row: 24}))
			screen := screenOf(user)
			api := newFakeAPI(t, objects([]nodeBuilder{legacyNode("node", "10.0.0.1", 16)}))
			ctx, interrupt := context.WithCancel(t.Context())
			defer interrupt()
			ended := start(ctx, t, api, program, program, "-w")
			screen.waitFor(t, "the node", func(text string) bool {
				return strings.Contains(text, "0/16                   0/16             16                 ..........")
			})
			api.put(newPod("pod", 8).on("node", 0))
			screen.waitFor(t, "the pod", func(text string) bool {
				last := text[strings.LastIndex(text, separator)+1:]
				return strings.Contains(last, "8/16                   8/16             8                  #####.....")
			})
			interrupt()
			if err := ended(); err != nil {
				t.Errorf("ended with %v", err)
			}
			if text := screen.String(); strings.HasPrefix(text, clearScreen) != (term == "xterm") || strings.Contains(text, "\x1b") != (term == "xterm") {
				t.Errorf("on a terminal of type %s: %q", term, text)
			}
		})
	}
}

// TestUsageOnTerminal: without --watch nothing is cleared.
func TestUsageOnTerminal(t *testing.T) {
	t.Setenv("TERM", "xterm")
	user, program := openTerminal(t)
	screen := screenOf(user)
	source := usageSource{
		client: fake.NewClientset(pluginPod("n1", 12347).Pod), now: time.Now,
		fetch: func(context.Context, *corev1.Pod, int) (protocol.Usage, error) { return usageOf("n1"), nil },
	}
	o := &options{connection: genericclioptions.NewConfigFlags(false), color: colorNever}
	o.streams.Out, o.streams.ErrOut = program, program
	check.Must(t, o.printUsage(t.Context(), source))
	screen.waitFor(t, "the line", func(text string) bool { return strings.Contains(text, "No container is known to use GPU memory") })
	if text := screen.String(); strings.Contains(text, clearScreen) {
		t.Errorf("%q", text)
	}
}
