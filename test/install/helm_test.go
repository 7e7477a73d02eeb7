package install

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
)

// helmPath and kubectlPath build the pinned helm and kubectl once and return their paths.
var (
	helmPath    = sync.OnceValues(func() (string, error) { return controlplane.Tool(context.Background(), "helm") })
	kubectlPath = sync.OnceValues(func() (string, error) { return controlplane.Tool(context.Background(), "kubectl") })
)

// shell runs commands in the repository's root, with helm and kubectl, as an administrator would.
func (h helm) shell(t *testing.T, commands string) string {
	t.Helper()
	out, err := h.tryShell(t, commands)
	must(t, err)
	return out
}

// tryShell is shell for commands that can fail.
func (h helm) tryShell(t *testing.T, commands string) (string, error) {
	t.Helper()
	kubectl, err := kubectlPath()
	must(t, err)
	tools := t.TempDir()
	must(t, os.Symlink(h.path, filepath.Join(tools, "helm")))
	must(t, os.Symlink(kubectl, filepath.Join(tools, "kubectl")))
	return controlplane.Shell{Dir: controlplane.Repository(t), Path: tools, Home: h.home, Kubeconfig: h.kubeconfig}.Run(t.Context(), commands, "")
}

// helm runs helm on the chart's folder with its own home directory.
type helm struct {
	path, home, kubeconfig string
}

func newHelm(t *testing.T, kubeconfig string) helm {
	t.Helper()
	path, err := helmPath()
	must(t, err)
	return helm{path: path, home: t.TempDir(), kubeconfig: kubeconfig}
}

func (h helm) try(args ...string) (string, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return "", err
	}
	cmd := exec.Command(h.path, args...)
	cmd.Dir = root
	cmd.Env = []string{"HOME=" + h.home, "PATH=" + os.Getenv("PATH"), "KUBECONFIG=" + h.kubeconfig}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stderr.String(), err
	}
	return stdout.String(), nil
}

func (h helm) run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := h.try(args...)
	if err != nil {
		t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}
