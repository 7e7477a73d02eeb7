package isolation

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpushare/gpushare/pkg/file"
)

// cdiDevices finds CDI devices as a container runtime does. Only one goroutine may use it at a time.
type cdiDevices struct {
	// dirs are in ascending order of precedence.
	dirs  []string
	files specFiles
}

// hooks returns the hooks of the device that the runtime adds to a container under this name, or why it adds none. The device of the last
// directory that has it counts. If a directory has it twice, the runtime uses neither, nor one of another directory
// (tags.cncf.io/container-device-interface pkg/cdi/cache.go, refresh).
func (d *cdiDevices) hooks(kind, name string) ([]*cdi.Hook, error) {
	var found *cdi.Device
	var common []*cdi.Hook
	var problems []error
	for _, dir := range d.dirs {
		specs, err := d.files.read(dir)
		if err != nil {
			problems = append(problems, err)
		}
		here := ""
		for _, file := range specs {
			for i := range file.spec.Devices {
				if file.spec.Kind != kind || file.spec.Devices[i].Name != name {
					continue
				}
				if here != "" {
					return nil, fmt.Errorf("two CDI specifications in %s have the device %s=%s, so the container runtime uses neither: remove %s or %s",
						dir, kind, name, here, file.info.Name())
				}
				here, found, common = file.info.Name(), &file.spec.Devices[i], file.spec.ContainerEdits.Hooks
			}
		}
	}
	if found == nil {
		missing := fmt.Errorf("no CDI specification in %s has the device %s=%s: nvidia-ctk cdi list, on the node, shows the devices",
			strings.Join(d.dirs, ", "), kind, name)
		return nil, errors.Join(append([]error{missing}, problems...)...)
	}
	return slices.Concat(common, found.ContainerEdits.Hooks), nil
}

// specFiles are the specifications of each directory by file name, as they were read last.
type specFiles map[string]map[string]specFile

type specFile struct {
	info fs.FileInfo
	spec *cdi.Spec
	err  error
}

// read returns the specifications of a directory by file name, and the errors of files that can't be read. It reads a file again only if it
// was replaced, and forgets removed ones: drivers of dynamic resource allocation write one for each claim.
func (f specFiles) read(dir string) (specs []specFile, err error) {
	entries, err := os.ReadDir(dir)
	before, now := f[dir], map[string]specFile{}
	f[dir] = now
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var problems []error
	for _, entry := range entries { // Sorted by name, as the runtime reads them.
		name := entry.Name()
		if ext := filepath.Ext(name); ext != ".json" && ext != ".yaml" {
			continue
		}
		path := filepath.Join(dir, name)
		info, err := os.Stat(path)
		if err != nil { // It was removed meanwhile, or the container runtime can follow the link.
			problems = append(problems, fmt.Errorf("%w: the device plugin has only the directory, so a link must not lead out of it", err))
			continue
		}
		read := before[name]
		if !file.Same(read.info, info) {
			read = specFile{info: info}
			read.spec, read.err = readSpec(path)
		}
		now[name] = read
		if read.err != nil {
			problems = append(problems, read.err)
			continue
		}
		specs = append(specs, read)
	}
	return specs, errors.Join(append(problems, err)...)
}

func readSpec(path string) (*cdi.Spec, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var spec cdi.Spec
	if err := yaml.Unmarshal(data, &spec); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &spec, nil
}
