package nodeconfig

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Source is where a node's configuration comes from.
type Source struct {
	// Path is a file for every node, or a directory with one file for each configuration, of which the node's label names one.
	// If it is empty, there is no file.
	Path string
	// Default is the file in the directory for nodes without the label. If it is empty, they have no file.
	Default string
	// Flags sets the values of flags and environment variables that are set. They override the file. It can be nil.
	Flags func(*Settings)
}

// Selected is the configuration of a node.
type Selected struct {
	// Name is the file's name without its directory, and empty without a file.
	Name string
	// Hash changes with the file's content.
	Hash     string
	Settings Settings
}

// perNode reports whether the node's label selects the file.
func (s Source) perNode() bool {
	info, err := os.Stat(s.Path)
	return err == nil && info.IsDir()
}

// Read returns the configuration of a node on which the label that selects one has this value; empty if it has no such label.
// The error names the file, or the label if that selects none.
func (s Source) Read(label string) (Selected, error) {
	path := s.Path
	if s.perNode() {
		name := cmp.Or(label, s.Default)
		if names := s.names(); name != "" && !slices.Contains(names, name) {
			from := fmt.Sprintf("label %s=%s", protocol.LabelConfig, label)
			if label == "" {
				from = "--default-config=" + s.Default
			}
			return Selected{}, fmt.Errorf("%s: %s has no such configuration, only %s", from, s.Path, strings.Join(names, ", "))
		}
		path = ""
		if name != "" {
			path = filepath.Join(s.Path, name)
		}
	}
	selected := Selected{Settings: Defaults()}
	if path != "" {
		data, err := os.ReadFile(path)
		if err != nil {
			return Selected{}, err
		}
		if selected.Settings, err = Decode(data); err != nil {
			return Selected{}, fmt.Errorf("%s: %w", path, err)
		}
		sum := sha256.Sum256(data)
		selected.Name, selected.Hash = filepath.Base(path), hex.EncodeToString(sum[:4])
	}
	if s.Flags != nil {
		s.Flags(&selected.Settings)
	}
	return selected, nil
}

// Ignored returns why the node's label has no effect; "" if it has none, or selects a file.
func (s Source) Ignored(label string) string {
	if label == "" || s.perNode() {
		return ""
	}
	return fmt.Sprintf("label %s=%s has no effect: the device plugin has no directory of configurations (--config, devicePlugin.config in the chart)",
		protocol.LabelConfig, label)
}

// names returns the names of the configurations in the directory. What begins with a dot belongs to the kubelet, which mounts it.
func (s Source) names() (names []string) {
	entries, _ := os.ReadDir(s.Path) // Without entries every name is an error.
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names
}
