package realgpu

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

// The amounts of TestDriverLimit in MiB. Each program fits the limit alone, with the some hundred MiB that CUDA needs in each process.
// Both together don't fit.
const (
	limitMiB  = 4 << 10
	firstMiB  = 2 << 10
	secondMiB = 5 << 9
)

// printed is what CUDA programs in a cgroup with a limit printed first.
type printed struct {
	// alone is of a program that allocated secondMiB while no other one ran.
	alone string
	// first is of a program that allocated firstMiB, second of one that allocated secondMiB beside it.
	first, second string
	// firstEnded is true if the first one had ended by then.
	firstEnded bool
}

func (p printed) String() string {
	return fmt.Sprintf("programs that allocate memory print: %d MiB alone %q, %d MiB first %q, %d MiB beside that %q", secondMiB, p.alone, firstMiB, p.first,
		secondMiB, p.second)
}

// outcome is what the programs show.
type outcome string

const (
	holds       outcome = "THE LIMIT HOLDS"
	doesNotHold outcome = "THE LIMIT DOES NOT HOLD"
	unclear     outcome = "UNCLEAR WHETHER THE LIMIT HOLDS"
)

// verdict returns what the programs show, with the reason. Out of memory may hit any call: a context takes memory too.
func (p printed) verdict() (outcome, string) {
	switch {
	case !hasMemory(p.alone):
		return unclear, fmt.Sprintf("a program alone gets no %d MiB: %q", secondMiB, p.alone)
	case !hasMemory(p.first):
		return unclear, fmt.Sprintf("the first program gets no %d MiB: %q", firstMiB, p.first)
	case p.firstEnded:
		return unclear, "the first program ended early"
	case hasMemory(p.second):
		return doesNotHold, fmt.Sprintf("two programs have %d and %d MiB at once", firstMiB, secondMiB)
	case !outOfMemory(p.second):
		return unclear, fmt.Sprintf("the second program fails for another reason: %q", p.second)
	}
	return holds, "the second program gets out of memory: " + p.second
}

// hasMemory reports whether a program that printed this has its memory.
func hasMemory(line string) bool { return strings.HasPrefix(line, "runs ") }

// outOfMemoryLine is what the program prints when a call returns CUDA_ERROR_OUT_OF_MEMORY.
var outOfMemoryLine = regexp.MustCompile(`^cu[A-Za-z]+: 2$`)

// outOfMemory reports whether a program that printed this could not get memory.
func outOfMemory(line string) bool { return outOfMemoryLine.MatchString(line) }

// TestVerdict needs no card.
func TestVerdict(t *testing.T) {
	const runs = "runs 3700 4096"
	for name, test := range map[string]struct {
		printed printed
		want    outcome
	}{
		"no memory is left for the second one":           {printed{runs, runs, "cuMemAlloc: 2", false}, holds},
		"not even for its context":                       {printed{runs, runs, "cuCtxCreate: 2", false}, holds},
		"nor for the driver's first call":                {printed{runs, runs, "cuInit: 2", false}, holds},
		"both have their memory":                         {printed{runs, runs, runs, false}, doesNotHold},
		"the first one ended early, the second one runs": {printed{runs, runs, runs, true}, unclear},
		"the first one ended early, the second one not":  {printed{runs, runs, "cuMemAlloc: 2", true}, unclear},
		"the limit is too small for one alone":           {printed{"cuMemAlloc: 2", runs, "cuMemAlloc: 2", false}, unclear},
		"the first one gets no memory":                   {printed{runs, "cuCtxCreate: 2", "cuMemAlloc: 2", false}, unclear},
		"another error":                                  {printed{runs, runs, "cuCtxCreate: 201", false}, unclear},
		"an error that ends alike":                       {printed{runs, runs, "cuMemAlloc: 702", false}, unclear},
		"a program that isn't in the cgroup":             {printed{runs, runs, "sh: 1: cannot create /x/cgroup.procs: Permission denied", false}, unclear},
		"a program that was killed":                      {printed{runs, runs, "", false}, unclear},
		"nothing runs":                                   {printed{}, unclear},
	} {
		if got, why := test.printed.verdict(); got != test.want || why == "" {
			t.Errorf("%s: %s (%s), want %s", name, got, why, test.want)
		}
	}
	if firstMiB+secondMiB <= limitMiB || max(firstMiB, secondMiB)+1024 > limitMiB {
		t.Error("the amounts don't tell a limit of all processes together from one of each process")
	}
}

// TestLaunch: a program runs only in the cgroup.
func TestLaunch(t *testing.T) {
	dir := t.TempDir() // A folder stands for a cgroup: the shell writes a file there.
	if p := launch(t, dir, []string{"GREETING=runs 1 2"}, "sh", "-c", `echo "$GREETING"; read -r line`); p.printed != "runs 1 2" || p.hasEnded() {
		t.Errorf("it prints %q", p.printed)
	}
	if p := launch(t, dir+"/missing", nil, "echo", "runs 1 2"); !strings.Contains(p.printed, "cgroup.procs") {
		t.Errorf("a program that can't enter the cgroup prints %q", p.printed)
	}
}
