package inspect

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// openTerminal returns both ends of a new pseudo-terminal: the user's and the program's.
func openTerminal(t *testing.T) (user, program *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("SKIPPED: this machine gives no pseudo-terminal: %v", err)
	}
	t.Cleanup(func() { user.Close() })
	control := func(do func(fd int) error) {
		t.Helper()
		raw, err := user.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var inner error
		if err := raw.Control(func(fd uintptr) { inner = do(int(fd)) }); err != nil || inner != nil {
			t.Fatal(err, inner)
		}
	}
	number := 0
	control(func(fd int) error { return unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0) })
	control(func(fd int) (err error) { number, err = unix.IoctlGetInt(fd, unix.TIOCGPTN); return err })
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("SKIPPED: this machine gives no pseudo-terminal: %v", err)
	}
	t.Cleanup(func() { program.Close() })
	return user, program
}

func resize(t *testing.T, terminal *os.File, width, height uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}); err != nil {
		t.Fatal(err)
	}
}

// read collects the output that the user sees.
func read(user *os.File) *output {
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

// TestWatchOnTerminal checks on a pseudo-terminal that a watch repaints in place, again after a resize, and restores the
// terminal at the end.
func TestWatchOnTerminal(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
	t.Setenv("LC_ALL", "C")
	t.Setenv("TERM", "xterm")
	user, program := openTerminal(t)
	resize(t, program, 120, 24)
	seen := read(user)

	api := newFakeAPI(t, objects([]nodeBuilder{legacyNode(t, "node", "10.0.0.1", 16)}))
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	errOut := newOutput()
	ended := startOn(ctx, t, api, genericiooptions.IOStreams{In: strings.NewReader(""), Out: program, ErrOut: errOut}, "-w")

	frame := func(what, want string) {
		t.Helper()
		seen.waitFor(t, what, func(text string) bool {
			frames := strings.Split(text, home)
			last := frames[len(frames)-1]
			return strings.Contains(last, want) && strings.HasSuffix(last, clearBelow+wrapOn)
		})
	}
	frame("first frame", "0/16                   0/16             16                 ..........")
	if text := seen.String(); !strings.HasPrefix(text, enterScreen) || strings.Contains(text, "\x1b[2J") {
		t.Errorf("the first frame doesn't paint in place: %q", text)
	}
	api.put(newPod("pod", 8).on("node", 0))
	frame("frame with the pod", "8/16                   8/16             8                  #####.....")

	resize(t, program, 72, 5)
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil { // As the kernel signals the foreground process.
		t.Fatal(err)
	}
	frame("frame of the new size", "8/16             8                  #####.....")
	frame("count of what doesn't fit", "... and 3 more lines")

	interrupt()
	if err := ended(); err != nil {
		t.Errorf("ended with %v", err)
	}
	seen.waitFor(t, "the terminal given back", func(text string) bool { return strings.HasSuffix(text, leaveScreen) })
	if errOut.String() != "" {
		t.Errorf("written to stderr: %s", errOut)
	}
}

func TestWatchOnDumbTerminal(t *testing.T) {
	t.Setenv("TERM", "dumb")
	user, program := openTerminal(t)
	resize(t, program, 120, 24)
	seen := read(user)
	api := newFakeAPI(t, objects([]nodeBuilder{legacyNode(t, "node", "10.0.0.1", 16)}))
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	ended := startOn(ctx, t, api, genericiooptions.IOStreams{In: strings.NewReader(""), Out: program, ErrOut: newOutput()}, "-w")
	seen.waitFor(t, "the node", func(text string) bool { return strings.Contains(text, "0/16") })
	api.put(newPod("pod", 8).on("node", 0))
	seen.waitFor(t, "the pod, below", func(text string) bool {
		_, second, found := strings.Cut(text, "========")
		return found && strings.Contains(second, "8/16")
	})
	interrupt()
	if err := ended(); err != nil {
		t.Errorf("ended with %v", err)
	}
	if text := seen.String(); strings.Contains(text, "\x1b") {
		t.Errorf("control sequences on a dumb terminal: %q", text)
	}
}
