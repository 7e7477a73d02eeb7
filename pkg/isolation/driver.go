package isolation

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/yaml"
	cdi "tags.cncf.io/container-device-interface/specs-go"
)

// Options are the places of a node's files.
type Options struct {
	// CgroupRoot is the hierarchy of cgroups.
	CgroupRoot string
	// SpecDirs are the directories in which the container runtime looks for CDI specifications, in ascending order of
	// precedence.
	SpecDirs []string
	// Limits is the specification of limits, in one of SpecDirs.
	Limits *LimitSpec
	// MPS are the node's MPS daemons.
	MPS *MPSDaemons
}

// CardKind is the device kind in the specifications that NVIDIA's container toolkit generates (nvidia-ctk cdi generate). They name
// the devices by UUID and by index.
const CardKind = "nvidia.com/gpu"

// limitHook is the command of NVIDIA's hook that sets the limit of a container's cgroup (toolkit 1.20.1 and later).
const limitHook = "apply-cuda-memory-limits"

// driver has the container runtime add the card with NVIDIA's hook, and the variables that the hook reads, both as CDI devices.
type driver struct {
	options Options
	specs   specFiles
}

func newDriver(o Options) *driver { return &driver{options: o, specs: specFiles{}} }

// Apply implements Backend.
func (d *driver) Apply(shares []Share) (edits Edits, err error) {
	for _, share := range shares {
		device, err := LimitDevice(share.Limit)
		if err != nil {
			return Edits{}, err
		}
		if err := d.options.Limits.Add(share.Limit); err != nil {
			return Edits{}, err
		}
		edits.Devices = append(edits.Devices, CardKind+"="+share.Card.Device)
		if !slices.Contains(edits.Devices, device) { // It is the same for each card.
			edits.Devices = append(edits.Devices, device)
		}
	}
	return edits, nil
}

// MaxContainers implements Backend.
func (d *driver) MaxContainers(Card) int { return 0 }

// Ready implements Backend. Only one goroutine may call it at a time.
func (d *driver) Ready(node Node, card Card) error {
	switch {
	case !exists(filepath.Join(d.options.CgroupRoot, "cgroup.controllers")):
		return fmt.Errorf("%s is not cgroup v2", d.options.CgroupRoot)
	case card.Unlimitable != nil:
		return card.Unlimitable
	}
	if err := card.usable(); err != nil {
		return err
	}
	if err := takesCDI(node); err != nil {
		return err
	}
	if err := d.options.Limits.Check(); err != nil {
		return err
	}
	return d.hasHook(card)
}

// takesCDI returns why kubelet or container runtime don't take CDI devices from a device plugin. containerd 1.7 does only if it is
// configured, which the Node object doesn't show.
func takesCDI(node Node) error {
	if older(node.KubeletVersion, 29) {
		return fmt.Errorf("kubelet %s takes no CDI devices: 1.29 is needed", node.KubeletVersion)
	}
	name, release, _ := strings.Cut(node.Runtime, "://")
	switch {
	case name == "containerd" && older(release, 7):
		return fmt.Errorf("containerd %s takes no CDI devices: 1.7 is needed", release)
	case name == "docker":
		return errors.New("cri-dockerd takes no CDI devices")
	}
	return nil
}

// older reports whether the text is a version and older than 1 and the minor version.
func older(text string, minor uint) bool {
	has, err := version.ParseGeneric(text)
	return err == nil && has.LessThan(version.MajorMinor(1, minor))
}

// hasHook returns why the runtime would not run NVIDIA's hook for the card. The device of the last directory that has it counts.
func (d *driver) hasHook(card Card) error {
	var found *cdi.ContainerEdits
	var problems []error
	for _, dir := range d.options.SpecDirs {
		specs, err := d.specs.read(dir)
		if err != nil {
			problems = append(problems, err)
		}
		for _, spec := range specs {
			if spec.Kind != CardKind {
				continue
			}
			for i := range spec.Devices {
				if device := &spec.Devices[i]; device.Name == card.Device {
					edits := device.ContainerEdits
					edits.Hooks = slices.Concat(spec.ContainerEdits.Hooks, edits.Hooks)
					found = &edits
				}
			}
		}
	}
	device := CardKind + "=" + card.Device
	if found == nil {
		return errors.Join(append([]error{fmt.Errorf("no CDI specification in %s has the device %s", strings.Join(d.options.SpecDirs, ", "), device)}, problems...)...)
	}
	for _, hook := range found.Hooks {
		if hook != nil && limits(hook.Args, card.UUID) {
			return nil
		}
	}
	return fmt.Errorf("the CDI device %s has no hook %s: NVIDIA's container toolkit 1.20.1 and a new specification are needed", device, limitHook)
}

// limits reports whether these are the arguments of a hook that limits memory of the card.
func limits(args []string, uuid string) bool {
	if !slices.Contains(args, limitHook) {
		return false
	}
	for i, arg := range args {
		ids, joined := strings.CutPrefix(arg, "--gpu-id=")
		if !joined && arg == "--gpu-id" && i+1 < len(args) {
			ids = args[i+1]
		}
		if slices.Contains(strings.Split(ids, ","), uuid) {
			return true
		}
	}
	return false
}

// specFiles are the specifications of each directory by file name, as they were read last.
type specFiles map[string]map[string]specFile

type specFile struct {
	info fs.FileInfo
	spec *cdi.Spec
	err  error
}

// read returns the specifications of a directory, and the errors of files that can't be read. It reads a file again only if it
// was replaced, and forgets removed ones: drivers of dynamic resource allocation write one for each claim.
func (f specFiles) read(dir string) (specs []*cdi.Spec, err error) {
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
		if err != nil {
			continue // It was removed meanwhile.
		}
		file, ok := before[name]
		if !ok || !os.SameFile(file.info, info) || !file.info.ModTime().Equal(info.ModTime()) || file.info.Size() != info.Size() {
			file = specFile{info: info}
			file.spec, file.err = readSpec(path)
		}
		now[name] = file
		if file.err != nil {
			problems = append(problems, file.err)
			continue
		}
		specs = append(specs, file.spec)
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
