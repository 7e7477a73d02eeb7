package docs

import (
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/test/check"
)

// Pull requests run all targets of .ci/run.
func TestWorkflowTargets(t *testing.T) {
	var workflow struct {
		Jobs map[string]struct {
			Strategy struct {
				Matrix struct{ Target []string }
			}
			Steps []struct{ Run string }
		}
	}
	check.Must(t, yaml.Unmarshal([]byte(read(t, ".github/workflows/ci.yml")), &workflow))
	targets := map[string]bool{}
	for _, job := range workflow.Jobs {
		for _, target := range job.Strategy.Matrix.Target {
			targets[target] = true
		}
		for _, step := range job.Steps {
			if _, target, found := strings.Cut(step.Run, "make "); found {
				targets[target] = true
			}
		}
	}
	steps := regexp.MustCompile(`(?m)^step make (\S+)`).FindAllStringSubmatch(read(t, ".ci/run"), -1)
	if len(steps) < 4 {
		t.Fatalf("too few targets in .ci/run: %q", steps)
	}
	for _, step := range steps {
		if !targets[step[1]] {
			t.Errorf(".github/workflows/ci.yml doesn't run make %s", step[1])
		}
	}
}

// Actions of other repositories are named by commit: a tag can be moved to other code, which would run with the workflow's rights.
func TestWorkflowActions(t *testing.T) {
	pinned := regexp.MustCompile(`^(\./.*|[a-z0-9/-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+)$`)
	for _, path := range []string{".github/workflows/ci.yml", ".github/actions/setup/action.yml"} {
		uses := regexp.MustCompile(`(?m)^\s*(?:- )?uses: (.*)$`).FindAllStringSubmatch(read(t, path), -1)
		if len(uses) == 0 {
			t.Errorf("%s uses no action", path)
		}
		for _, use := range uses {
			if !pinned.MatchString(use[1]) {
				t.Errorf("%s: %s isn't a commit with its version, such as actions/checkout@0123… # v1.2.3", path, use[1])
			}
		}
	}
}
