package isolation

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// cdiDevices are the CDI devices that a container runtime finds in the directories, by the same code.
type cdiDevices struct {
	// dirs are in ascending order of precedence.
	dirs []string
	// cache reads the directories, and again when they change. Modes that need no devices don't call it.
	cache func() *cdi.Cache
}

func newCDIDevices(dirs []string) *cdiDevices {
	return &cdiDevices{dirs, sync.OnceValue(func() *cdi.Cache {
		cache, _ := cdi.NewCache(cdi.WithSpecDirs(dirs...)) // The error is always nil.
		return cache
	})}
}

// hooks returns the hooks of the device of this name, or why the runtime doesn't find it.
func (d *cdiDevices) hooks(name string) ([]*specs.Hook, error) {
	cache := d.cache()
	if device := cache.GetDevice(name); device != nil {
		return slices.Concat(device.GetSpec().ContainerEdits.Hooks, device.ContainerEdits.Hooks), nil
	}
	problems := []error{fmt.Errorf("no CDI specification in %s has the device %s, or several have it, and the container runtime uses none of them: "+
		"nvidia-ctk cdi list, on the node, shows the devices", strings.Join(d.dirs, ", "), name)}
	found := cache.GetErrors()
	for _, path := range slices.Sorted(maps.Keys(found)) {
		problems = append(problems, found[path]...)
	}
	return nil, errors.Join(problems...)
}
