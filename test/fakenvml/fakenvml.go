// Package fakenvml gives tests a machine with simulated NVIDIA cards: it compiles the fake management library in src,
// and writes the files that define the library's cards and their Xid errors.
//
// Only the C library is fake: programs load it by dlopen through the same bindings as the real one. Cards can fail and
// recover while a program runs.
package fakenvml

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// The environment variables with the paths of the library's files.
const (
	CardsEnv  = "FAKE_NVML_CARDS"
	EventsEnv = "FAKE_NVML_EVENTS"
	StateEnv  = "FAKE_NVML_STATE"
	// LinesEnv has the lines of the cards file themselves. It counts if CardsEnv isn't set.
	LinesEnv = "FAKE_NVML_CARD_LINES"
)

//go:embed build.sh src
var sources embed.FS

// BeforeR615 omits the functions for memory limits.
const BeforeR615 = "-DFAKE_NVML_BEFORE_R615"

// ErrNoCompiler is the error for a missing C compiler.
var ErrNoCompiler = errors.New("no C compiler")

// Build compiles the library into dir and returns its path.
func Build(dir string, flags ...string) (string, error) {
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	if _, err := exec.LookPath(compiler); err != nil {
		return "", fmt.Errorf("%w: %w", ErrNoCompiler, err)
	}
	build := filepath.Join(dir, "fakenvml")
	if err := os.CopyFS(build, sources); err != nil {
		return "", fmt.Errorf("lay out the fake NVML's sources: %w", err)
	}
	library := filepath.Join(dir, "libnvidia-ml.so.1")
	command := exec.Command("/bin/sh", append([]string{filepath.Join(build, "build.sh"), library}, flags...)...)
	if out, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile the fake NVML: %w\n%s", err, out)
	}
	return library, nil
}

// compiled holds a function for each set of flags that returns the library. The tests of a package share what it has compiled.
var compiled sync.Map

func compile(flags []string) func() ([]byte, error) {
	return sync.OnceValues(func() ([]byte, error) {
		dir, err := os.MkdirTemp("", "fakenvml")
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
		library, err := Build(dir, flags...)
		if err != nil {
			return nil, err
		}
		return os.ReadFile(library)
	})
}

// BuildForTest writes the library into a temporary folder. It skips the test if there is no C compiler.
func BuildForTest(t testing.TB, flags ...string) string {
	t.Helper()
	library, _ := compiled.LoadOrStore(strings.Join(flags, " "), compile(flags))
	content, err := library.(func() ([]byte, error))()
	if errors.Is(err, ErrNoCompiler) {
		t.Skipf("SKIPPED, not tested: %v", err)
	}
	path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	check.Must(t, errors.Join(err, os.WriteFile(path, content, 0o755)))
	return path
}

// Card is one line of the cards file. Its index is its position in the list.
type Card struct {
	UUID  string
	Model string
	// MiB is the card's memory in MiB.
	MiB uint64
	// NUMANode is written as "-" (unknown) if it is negative.
	NUMANode int
	// State is the card's failure, or empty for none; src/cards.c lists the states.
	State string
	// Options are the card's properties and failures, such as "reserved=525" and "limits=unsupported"; README.md lists them.
	Options []string
}

// Machine is the set of files that defines one machine's driver. Its only state is their paths, so any process that
// knows the folder can make a card fail. It is not safe for concurrent use.
type Machine struct {
	CardsFile, EventsFile string
	// StateDir is the folder with memory limits, processes and compute modes (state.go).
	StateDir string
}

// NewMachine returns the machine with its files in dir. The files can exist already.
func NewMachine(dir string) Machine {
	return Machine{
		CardsFile: filepath.Join(dir, "cards.csv"), EventsFile: filepath.Join(dir, "events"), StateDir: filepath.Join(dir, "state"),
	}
}

// Env returns the environment variables with which a program finds the machine's files.
func (m Machine) Env() []string {
	return []string{CardsEnv + "=" + m.CardsFile, EventsEnv + "=" + m.EventsFile, StateEnv + "=" + m.StateDir}
}

// Break makes all calls of the library fail with an unknown error, until SetCards.
func (m Machine) Break() error { return replace(m.CardsFile, []byte("a file without cards\n")) }

// Mismatch replaces the machine's driver by one whose version doesn't match the library.
func (m Machine) Mismatch() error { return replace(m.CardsFile, []byte("mismatch\n")) }

// SetCards replaces the machine's cards.
func (m Machine) SetCards(cards ...Card) error {
	var text bytes.Buffer
	fmt.Fprintln(&text, "# UUID, model, memory in MiB, NUMA node, state, options")
	for _, c := range cards {
		numa, state := "-", c.State
		if c.NUMANode >= 0 {
			numa = strconv.Itoa(c.NUMANode)
		}
		if state == "" {
			state = "ok"
		}
		fields := append([]string{c.UUID, c.Model, strconv.FormatUint(c.MiB, 10), numa, state}, c.Options...)
		fmt.Fprintln(&text, strings.Join(fields, ", "))
	}
	return replace(m.CardsFile, text.Bytes())
}

// replace replaces a file atomically, so that no reader sees a part of it.
func replace(path string, text []byte) error {
	temporary := path + ".new"
	if err := os.WriteFile(temporary, text, 0o644); err != nil {
		return fmt.Errorf("writing a file of the fake NVML: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("replacing a file of the fake NVML: %w", err)
	}
	return nil
}

// Xid reports Xid errors of a card, given by UUID or index, in a single write.
func (m Machine) Xid(card string, xids ...int) error {
	var text bytes.Buffer
	for _, xid := range xids {
		fmt.Fprintln(&text, card, xid)
	}
	file, err := os.OpenFile(m.EventsFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("opening the fake NVML's events: %w", err)
	}
	_, err = file.Write(text.Bytes())
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("append to the fake NVML's events: %w", err)
	}
	return nil
}
