package controlplane

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// RequireEnv is the environment variable that makes missing binaries a failure instead of a skip.
const RequireEnv = "GPUSHARE_REQUIRE_CONTROL_PLANE"

// LongEnv is the environment variable that enables the long form of the tests.
const LongEnv = "GPUSHARE_TEST_LONG"

// SeldomGC lets a component collect garbage less often, for Options.Env of a test: a fifth of the processor time of a control plane's start went
// there. The API server needs 90 MiB more.
const SeldomGC = "GOGC=400"

// Repository returns the repository's root.
func Repository(t testing.TB) string {
	t.Helper()
	root, err := RepositoryRoot()
	check.Must(t, err)
	return root
}

// Long reports whether LongEnv is set.
func Long() bool { return os.Getenv(LongEnv) != "" }

// Times returns short, or long if LongEnv is set: the number of repetitions in a test.
func Times(short, long int) int {
	if Long() {
		return long
	}
	return short
}

// StartForTest starts a control plane and stops it when the test ends. If binaries are missing it skips the test, or
// fails it if RequireEnv is set. After a failed test it prints the end of each log and keeps the folder.
func StartForTest(t testing.TB, o Options) *ControlPlane {
	t.Helper()
	if err := o.Binaries(); errors.Is(err, ErrNoBinaries) && os.Getenv(RequireEnv) == "" {
		fmt.Fprintf(os.Stderr, "SKIPPED %s: %v\n", t.Name(), err)
		t.Skip(err)
	}
	if o.Dir == "" {
		o.Dir = testDir(t)
	}
	o.Env = append(o.Env, SeldomGC)
	c, err := Start(t.Context(), o)
	check.Must(t, err)
	t.Cleanup(func() {
		check.NoError(t, c.Stop())
		printLogs(t, c.Processes()...)
	})
	return c
}

// RunForTest starts a process, kills it when the test ends, and prints the end of its log after a failed test.
func RunForTest(t testing.TB, p *Process) {
	t.Helper()
	t.Cleanup(func() {
		check.NoError(t, p.Kill())
		printLogs(t, p)
	})
	check.Must(t, p.Start(t.Context()))
}

// StartProxyForTest starts a proxy in front of the API server and closes it when the test ends.
func (c *ControlPlane) StartProxyForTest(t testing.TB) *Proxy {
	t.Helper()
	proxy, err := c.StartProxy()
	check.Must(t, err)
	t.Cleanup(func() {
		check.NoError(t, proxy.Close())
	})
	return proxy
}

// ReservePortForTest reserves a port until the test ends.
func ReservePortForTest(t testing.TB) *Port {
	t.Helper()
	port, err := ReservePort()
	check.Must(t, err)
	t.Cleanup(port.Release)
	return port
}

// testDir is like t.TempDir, but it keeps the folder of a failed test for its logs.
func testDir(t testing.TB) string {
	name := strings.NewReplacer("/", "-", " ", "-").Replace(t.Name())
	dir, err := os.MkdirTemp("", "gpushare-"+name+"-")
	check.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the control plane's files are in %s", dir)
			return
		}
		check.NoError(t, os.RemoveAll(dir))
	})
	return dir
}

func printLogs(t testing.TB, processes ...*Process) {
	if !t.Failed() {
		return
	}
	for _, p := range processes {
		t.Logf("%s: %s", p.Name, p.tail())
	}
}
