package inventory

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakenvml"
)

// childEnv is set in a test's child process. It holds the directory of the fake machine on which the process runs.
const childEnv = "GPUSHARE_INVENTORY_TEST_MACHINE"

// onMachine runs a top-level test in its own process, with a fake NVML that is built with flags. The extra process is
// needed because a process can load only one library and can't unload it. The machine has the given cards; if cards is
// nil, it has no driver.
func onMachine(t *testing.T, cards []fakenvml.Card, test func(t *testing.T, library string, machine fakenvml.Machine),
	flags ...string,
) {
	t.Helper()
	if dir := os.Getenv(childEnv); dir != "" {
		test(t, filepath.Join(dir, "libnvidia-ml.so.1"), fakenvml.NewMachine(dir))
		return
	}

	t.Parallel()
	dir := filepath.Dir(fakenvml.BuildForTest(t, flags...))
	machine := fakenvml.NewMachine(dir)
	if cards != nil {
		setCards(t, machine, cards...)
	}
	self, err := os.Executable()
	must(t, err)
	child := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
	child.Env = append(append(os.Environ(), machine.Env()...), childEnv+"="+dir)
	out, err := child.CombinedOutput()
	t.Logf("its own process said:\n%s", out)
	must(t, err)
}

func setCards(t *testing.T, machine fakenvml.Machine, cards ...fakenvml.Card) {
	t.Helper()
	must(t, machine.SetCards(cards...))
}

var expect = check.Equal

// with returns a copy of cards in which one card has another state.
func with(cards []fakenvml.Card, index int, state string) []fakenvml.Card {
	changed := append([]fakenvml.Card(nil), cards...)
	changed[index].State = state
	return changed
}
