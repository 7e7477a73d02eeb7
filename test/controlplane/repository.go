package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const modulePath = "github.com/gpushare/gpushare"

// ErrNoBinaries is the error for Kubernetes binaries that are not built.
var ErrNoBinaries = errors.New("the Kubernetes binaries are missing: `make kube` builds them (takes some minutes the first time)")

// RepositoryRoot returns the root of this repository: the first matching folder from the working directory upwards.
func RepositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("looking for the repository: %w", err)
	}
	for {
		data, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(data), "module "+modulePath+"\n") {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("no folder from the working directory upwards is the root of %s", modulePath)
		}
		dir = parent
	}
}

// Tool builds helm or kubectl, which hack/helm pins, and returns the path of the program.
func Tool(ctx context.Context, name string) (string, error) {
	root, err := RepositoryRoot()
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "go", "-C", filepath.Join(root, "hack", "helm"), "tool", "-n", name).Output()
	if err != nil {
		return "", fmt.Errorf("building %s: %w", name, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Binaries returns ErrNoBinaries if a binary that Options needs is not built.
func (o Options) Binaries() error {
	o, err := o.withDefaults()
	if err != nil {
		return err
	}
	for _, name := range o.components() {
		path := filepath.Join(o.KubeDir, name)
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%w: %w", ErrNoBinaries, err)
		}
	}
	return nil
}

// VersionEnv is the environment variable that selects another Kubernetes version for the tests, one that hack/kube
// pins, such as v1.34.
const VersionEnv = "GPUSHARE_TEST_KUBERNETES"

// KubeDir returns the folder of the binaries of the Kubernetes version under test, in the repository.
func KubeDir(root string) string {
	name := "kube"
	if version := os.Getenv(VersionEnv); version != "" {
		name += "-" + version
	}
	return filepath.Join(root, "bin", name)
}
