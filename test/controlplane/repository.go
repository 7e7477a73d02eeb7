package controlplane

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const modulePath = "github.com/gpushare/gpushare"

// ErrNoBinaries says that the Kubernetes binaries haven't been built.
var ErrNoBinaries = errors.New("the Kubernetes binaries are missing: `make kube` builds them (the first time in some minutes)")

// RepositoryRoot returns the root of this repository, looking from the working directory upwards.
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

// Binaries returns nil if everything that Options asks for has been built, and ErrNoBinaries otherwise.
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

// VersionEnv is the environment variable that names another Kubernetes for the tests to run on, one that hack/kube pins,
// such as v1.33.
const VersionEnv = "GPUSHARE_TEST_KUBERNETES"

// KubeDir is where the Kubernetes binaries of the repository are.
func KubeDir(root string) string {
	name := "kube"
	if version := os.Getenv(VersionEnv); version != "" {
		name += "-" + version
	}
	return filepath.Join(root, "bin", name)
}
