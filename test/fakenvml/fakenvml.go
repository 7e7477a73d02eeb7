// Package fakenvml gives tests a machine with the NVIDIA cards that they ask for: it compiles the fake management
// library that lies in src beside it, and writes the files that tell the library its cards and their Xid errors.
//
// What is faked ends at the C interface: programs load the library by dlopen through the same bindings as the real
// one. Cards may be broken and mended while a program runs.
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
	"testing"
)

// The environment variables by which the library finds its files.
const (
	CardsEnv  = "FAKE_NVML_CARDS"
	EventsEnv = "FAKE_NVML_EVENTS"
)

//go:embed build.sh src
var sources embed.FS

// Old leaves out the functions that an old driver's library lacks.
const Old = "-DFAKE_NVML_OLD"

// ErrNoCompiler says that there is no C compiler to build the library with.
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

// BuildForTest compiles the library into a folder of the test's own, and skips the test where there is no C compiler.
func BuildForTest(t testing.TB, flags ...string) string {
	t.Helper()
	library, err := Build(t.TempDir(), flags...)
	if errors.Is(err, ErrNoCompiler) {
		t.Skipf("SKIPPED, not tested: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return library
}

// Card is one line of the cards file. Its index is its place in the list.
type Card struct {
	UUID  string
	Model string
	// MiB is the card's memory.
	MiB uint64
	// NUMANode is written "-" (not known) where it is negative.
	NUMANode int
	// State is what is wrong with the card, empty for nothing; src/cards.c lists them.
	State string
}

// Machine is the pair of files that stands for one machine's driver. It keeps no state but their paths, so any process
// that knows the folder can break a card. It may be used by one goroutine at a time.
type Machine struct {
	CardsFile, EventsFile string
}

// NewMachine names the files of a machine in dir, where they may exist already.
func NewMachine(dir string) Machine {
	return Machine{CardsFile: filepath.Join(dir, "cards.csv"), EventsFile: filepath.Join(dir, "events")}
}

// Env is what the environment of a program needs to find the machine's files.
func (m Machine) Env() []string {
	return []string{CardsEnv + "=" + m.CardsFile, EventsEnv + "=" + m.EventsFile}
}

// Mismatch exchanges the machine's driver for one that doesn't match the library.
func (m Machine) Mismatch() error { return m.replace([]byte("mismatch\n")) }

// SetCards replaces the machine's cards.
func (m Machine) SetCards(cards ...Card) error {
	var text bytes.Buffer
	fmt.Fprintln(&text, "# UUID, model, memory in MiB, NUMA node, state")
	for _, c := range cards {
		numa, state := "-", c.State
		if c.NUMANode >= 0 {
			numa = strconv.Itoa(c.NUMANode)
		}
		if state == "" {
			state = "ok"
		}
		fmt.Fprintf(&text, "%s, %s, %d, %s, %s\n", c.UUID, c.Model, c.MiB, numa, state)
	}
	return m.replace(text.Bytes())
}

// replace changes the cards' file at once, so that no reader finds half of it.
func (m Machine) replace(text []byte) error {
	temporary := m.CardsFile + ".new"
	if err := os.WriteFile(temporary, text, 0o644); err != nil {
		return fmt.Errorf("write the fake NVML's cards: %w", err)
	}
	if err := os.Rename(temporary, m.CardsFile); err != nil {
		return fmt.Errorf("replace the fake NVML's cards: %w", err)
	}
	return nil
}

// Xid reports Xid errors of one card, named by UUID or index, in a single write.
func (m Machine) Xid(card string, xids ...int) error {
	var text bytes.Buffer
	for _, xid := range xids {
		fmt.Fprintln(&text, card, xid)
	}
	file, err := os.OpenFile(m.EventsFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open the fake NVML's events: %w", err)
	}
	_, err = file.Write(text.Bytes())
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("append to the fake NVML's events: %w", err)
	}
	return nil
}
