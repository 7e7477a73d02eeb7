package isolation

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

// Options are the places of a node's files.
type Options struct {
	// CgroupRoot is the hierarchy of cgroups.
	CgroupRoot string
	// SpecDirs are the directories in which the container runtime looks for CDI specifications, in ascending order of
	// precedence. The specification of limits is written to the last one.
	SpecDirs []string
	// CardsByCDI is true if containers get their cards as CDI devices in every mode.
	CardsByCDI bool
	// MPS is the directory of the node's MPS daemons.
	MPS MPSDirectory
}

// CardKind is the device kind in the specifications that NVIDIA's container toolkit generates (nvidia-ctk cdi generate). They name
// the devices by UUID and by index.
const CardKind = "nvidia.com/gpu"

// limitHook is the command of NVIDIA's hook that sets the limit of a container's cgroup (toolkit 1.20.1 and later).
const limitHook = "apply-cuda-memory-limits"

// driver has the container runtime add the card with NVIDIA's hook, and the variables that the hook reads, both as CDI devices.
type driver struct {
	noLimits
	daemons MPSDirectory
	cgroups string
	devices *cdiDevices
	limits  *limitSpec
}

// Apply implements Backend.
func (d *driver) Apply(shares []Share) (edits Edits, err error) {
	for _, share := range shares {
		device, err := limitDevice(share.Limit)
		if err != nil {
			return Edits{}, err
		}
		if err := d.limits.Add(share.Limit); err != nil {
			return Edits{}, err
		}
		edits.Devices = append(edits.Devices, CardKind+"="+share.Card.Device)
		if !slices.Contains(edits.Devices, device) { // It is the same for each card.
			edits.Devices = append(edits.Devices, device)
		}
	}
	return edits, nil
}

// LimitOf implements Backend.
func (d *driver) LimitOf(edits Edits) (limit uint64, limited bool) {
	for _, device := range edits.Devices {
		if limit, ok := limitOf(device); ok {
			return limit, true
		}
	}
	return 0, false
}

// Ready implements Backend. Only one goroutine may call it at a time.
func (d *driver) Ready(card Card) error {
	switch {
	case !exists(filepath.Join(d.cgroups, "cgroup.controllers")):
		return fmt.Errorf("%s is not cgroup v2", d.cgroups)
	case card.Unlimitable != nil:
		return card.Unlimitable
	}
	if err := d.daemons.leftoverComputeMode(card); err != nil {
		return err
	}
	if err := takesCDI(card.Runtime); err != nil {
		return err
	}
	if err := d.limits.Check(); err != nil {
		return err
	}
	return d.hasHook(card)
}

// takesCDI returns why a container runtime takes no CDI devices from a device plugin. containerd 1.7 does only if it is configured, which the Node
// object doesn't show.
func takesCDI(runtime string) error {
	name, release, _ := strings.Cut(runtime, "://")
	switch has, err := version.ParseGeneric(release); {
	case name == "containerd" && err == nil && has.LessThan(version.MajorMinor(1, 7)):
		return fmt.Errorf("containerd %s takes no CDI devices: 1.7 is needed", release)
	case name == "docker":
		return errors.New("cri-dockerd takes no CDI devices")
	}
	return nil
}

// hasHook returns why the runtime would not run NVIDIA's hook for the card.
func (d *driver) hasHook(card Card) error {
	hooks, err := d.devices.hooks(CardKind + "=" + card.Device)
	if err != nil {
		return err
	}
	for _, hook := range hooks {
		if hook != nil && limits(hook.Args, card.UUID) {
			return nil
		}
	}
	return fmt.Errorf("the CDI device %s=%s has no hook %s: NVIDIA's container toolkit 1.20.1 and a new specification are needed",
		CardKind, card.Device, limitHook)
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
